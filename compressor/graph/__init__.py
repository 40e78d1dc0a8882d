"""A bare ONNX graph as a model: its operators in torch, and its signature."""
