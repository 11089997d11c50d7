"""Optimize a folder of ONNX components."""
