"""The choice of the fastest engine that keeps the metric, and the quantized graphs of its candidates."""
