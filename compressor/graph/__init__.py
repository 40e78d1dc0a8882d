"""ONNX graphs as PyTorch modules: what is measured, pruned and trained where there is no model folder."""
