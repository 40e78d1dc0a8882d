"""The graph passes, one a file, each usable alone as an `onnx_ir` pass."""

from graph_passes.passes.clean_up import CleanUp
from graph_passes.passes.drop_unused_blocks import DropUnusedBlocks
from graph_passes.passes.fold_gates import FoldGates
from graph_passes.passes.insert_gates import InsertGates
from graph_passes.passes.lower_block_sparse import LowerBlockSparse
from graph_passes.passes.normalize import Normalize
from graph_passes.passes.remove_dead_branches import RemoveEmptyAttention
from graph_passes.passes.remove_units import RemoveHeads
from graph_passes.passes.scale_queries import ScaleQueries

__all__ = [
    "CleanUp",
    "DropUnusedBlocks",
    "FoldGates",
    "InsertGates",
    "LowerBlockSparse",
    "Normalize",
    "RemoveEmptyAttention",
    "RemoveHeads",
    "ScaleQueries",
]
