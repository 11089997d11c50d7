"""Export: the only part of sdonnx that needs torch, diffusers and transformers."""
