"""The benchmark: engines in processes of their own, their latency, memory, images and kernels beside one another.

`sdonnx.benchmark.command` is what a user calls. Nothing is imported here: an engine's process holds no more than it
needs.
"""
