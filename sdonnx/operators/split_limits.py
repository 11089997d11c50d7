"""The limit of ONNX Runtime's kernel for the standard operator Split."""

__all__ = ["MAX_SPLIT_OUTPUTS"]

MAX_SPLIT_OUTPUTS = 32
"""ONNX Runtime's Split passes the addresses of up to 32 outputs as arguments of its kernel.

For more outputs it copies the addresses from a host buffer while it runs (CudaAsyncBuffer in its split.cc). The buffer
belongs to someone else by the time a captured graph is replayed.
"""
