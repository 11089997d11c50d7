"""Compile torch modules of diffusers: `sdonnx.compile`."""
