"""Check the environment of this machine and the results of its ONNX Runtime kernels."""
