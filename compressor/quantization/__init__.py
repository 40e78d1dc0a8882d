"""Quantization of graphs: the portable graph in int8, and the symmetric one in int8 or fp8."""

from compressor.quantization.matmuls import output_distance, quantize_without_ruined, rank_matmuls, ruined_matmuls
from compressor.quantization.portable import QuantizedGraph, quantize_graph, require_nncf
from compressor.quantization.symmetric import quantize_symmetric

__all__ = [
    "QuantizedGraph",
    "output_distance",
    "quantize_graph",
    "quantize_symmetric",
    "quantize_without_ruined",
    "rank_matmuls",
    "require_nncf",
    "ruined_matmuls",
]
