"""The run-time: numpy, ONNX Runtime, tokenizers and Pillow; neither torch nor onnx."""
