"""Sessions, buffers, streams and memory of a device."""
