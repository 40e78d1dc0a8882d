"""Quantization of graphs: the portable graph in int8."""

from compressor.quantization.portable import QuantizedGraph, quantize_graph, require_nncf

__all__ = ["QuantizedGraph", "quantize_graph", "require_nncf"]
