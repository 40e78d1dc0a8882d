"""Quantization of graphs: the portable graph in int8."""

from compressor.quantization.outliers import quantize_without_ruined, ruined_products
from compressor.quantization.portable import QuantizedGraph, quantize_graph, require_nncf
from compressor.quantization.sensitivity import rank_products

__all__ = [
    "QuantizedGraph",
    "quantize_graph",
    "quantize_without_ruined",
    "rank_products",
    "require_nncf",
    "ruined_products",
]
