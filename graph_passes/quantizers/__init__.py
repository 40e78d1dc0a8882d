"""Symmetric quantizers in a graph, as TensorRT wants them: their places, and a check of them."""
