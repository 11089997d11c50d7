"""The HTTP server: OpenAI's images API, health, metrics and a page to try it."""
