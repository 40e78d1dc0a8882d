"""Block-sparse attention as an ONNX local function, and the block masks that it computes."""
