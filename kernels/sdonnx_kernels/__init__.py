"""Holds `libsdonnx_kernels.so`, the operators of sdonnx for NVIDIA GPUs; sdonnx finds it by this package's name."""
