"""Quantization of weights to 8 bits."""
