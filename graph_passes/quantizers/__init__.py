"""Symmetric quantizers in a graph, as TensorRT expects them: their places, and a check of them."""
