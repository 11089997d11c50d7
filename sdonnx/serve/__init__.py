"""Image generation for many clients: a queue with batches in process, an HTTP server, Ray Serve and Triton."""
