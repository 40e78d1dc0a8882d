"""Graphs and engines of a model: built, proven, quantized, scored, and the fastest chosen that keeps the metric."""
