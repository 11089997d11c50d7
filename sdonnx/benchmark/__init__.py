"""The benchmark: runs each engine in its own process and compares latency, memory, images and kernels.

The command line is `sdonnx.cli.benchmark`. This module imports nothing, so that an engine's process loads only the
modules that it needs.
"""
