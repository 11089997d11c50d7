"""Load ONNX files and reject broken ones."""
