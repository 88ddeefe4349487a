"""ONNX models into graphs, and nothing else: reading files, converters, shape arithmetic."""
