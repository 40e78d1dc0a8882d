"""Quantization of graphs: the portable graph in int8, and the symmetric one in int8 or fp8."""

from compressor.quantization.portable import QuantizedGraph, quantize_graph, require_nncf
from compressor.quantization.products import output_distance, quantize_without_ruined, rank_products, ruined_products
from compressor.quantization.symmetric import quantize_symmetric

__all__ = [
    "QuantizedGraph",
    "output_distance",
    "quantize_graph",
    "quantize_symmetric",
    "quantize_without_ruined",
    "rank_products",
    "require_nncf",
    "ruined_products",
]
