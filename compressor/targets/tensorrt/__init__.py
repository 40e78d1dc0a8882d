"""TensorRT 8.6, 10 and 11."""
