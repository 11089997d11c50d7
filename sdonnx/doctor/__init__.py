"""Whether this machine has what drawing needs, and whether its kernels compute what they should."""
