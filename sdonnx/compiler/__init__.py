"""Compile torch modules in memory: `sdonnx.compile`."""
