"""Image generation for many clients: a queue with batches in process, an HTTP server, and Ray Serve."""
