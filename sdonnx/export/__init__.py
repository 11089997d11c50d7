"""Export of diffusers pipelines to ONNX, with torch, diffusers and transformers."""
