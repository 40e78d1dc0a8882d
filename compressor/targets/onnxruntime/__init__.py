"""The target ONNX Runtime, on CUDA or on the CPU."""
