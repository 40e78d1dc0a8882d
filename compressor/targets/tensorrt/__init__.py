"""The target TensorRT, in versions 8.6, 10 and 11."""
