"""The graph passes, one per file. Each is an `onnx_ir` pass that returns a report of what it changed."""

from graph_passes.passes.clean_up import CleanUp
from graph_passes.passes.count_positions import CountPositions
from graph_passes.passes.drop_idle_caches import DropIdleCaches
from graph_passes.passes.drop_unread_positions import DropUnreadPositions
from graph_passes.passes.drop_unused_blocks import DropUnusedBlocks
from graph_passes.passes.fold_computed_weights import FoldComputedWeights
from graph_passes.passes.fold_gates import FoldGates
from graph_passes.passes.fold_weights import FoldWeights
from graph_passes.passes.fuse_cached_attention import FuseCachedAttention
from graph_passes.passes.fuse_for_ort import FuseForOrt
from graph_passes.passes.fuse_rotary_embedding import FuseRotaryEmbedding
from graph_passes.passes.insert_gates import InsertGates
from graph_passes.passes.insert_product_gates import InsertProductGates
from graph_passes.passes.insert_quantizers import InsertQuantizers
from graph_passes.passes.join_products import JoinProducts
from graph_passes.passes.lower_block_sparse import LowerBlockSparse
from graph_passes.passes.lower_opset import LowerOpset
from graph_passes.passes.make_axes_explicit import MakeAxesExplicit
from graph_passes.passes.merge_reshapes import MergeReshapes
from graph_passes.passes.name_decoding_axes import NameDecodingAxes
from graph_passes.passes.name_squeezed_axes import NameSqueezedAxes
from graph_passes.passes.narrow_integers import NarrowIntegers
from graph_passes.passes.normalize import Normalize
from graph_passes.passes.pack_attention import PackAttention
from graph_passes.passes.prefusion import PrepareForFusion
from graph_passes.passes.quantize_weights import QuantizeWeights
from graph_passes.passes.quantize_weights_inside import QuantizeWeightsInside
from graph_passes.passes.read_whole_texts import ReadWholeTexts
from graph_passes.passes.record_reach import RecordReach
from graph_passes.passes.reduce_precision import ReducePrecision
from graph_passes.passes.remove_dead_branches import RemoveDeadBranches
from graph_passes.passes.remove_idle_expands import RemoveIdleExpands
from graph_passes.passes.remove_units import RemoveUnits
from graph_passes.passes.return_to_floats import ReturnToFloats
from graph_passes.passes.rotate_in_attention import RotateInAttention
from graph_passes.passes.scale_queries import ScaleQueries
from graph_passes.passes.separate_biases import SeparateBiases
from graph_passes.passes.separate_projections import SeparateProjections
from graph_passes.passes.simplify_lookups import SimplifyLookups
from graph_passes.passes.split_skip_norms import SplitSkipNorms
from graph_passes.passes.state_cache_sizes import StateCacheSizes
from graph_passes.passes.transfer_weights import TransferWeights
from graph_passes.passes.transpose_single_query import TransposeSingleQuery
from graph_passes.passes.use_padding_mask import UsePaddingMask

__all__ = [
    "CleanUp",
    "CountPositions",
    "DropIdleCaches",
    "DropUnreadPositions",
    "DropUnusedBlocks",
    "FoldComputedWeights",
    "FoldGates",
    "FoldWeights",
    "FuseCachedAttention",
    "FuseForOrt",
    "FuseRotaryEmbedding",
    "InsertGates",
    "InsertProductGates",
    "InsertQuantizers",
    "JoinProducts",
    "LowerBlockSparse",
    "LowerOpset",
    "MakeAxesExplicit",
    "MergeReshapes",
    "NameDecodingAxes",
    "NameSqueezedAxes",
    "NarrowIntegers",
    "Normalize",
    "PackAttention",
    "PrepareForFusion",
    "QuantizeWeights",
    "QuantizeWeightsInside",
    "ReadWholeTexts",
    "RecordReach",
    "ReducePrecision",
    "RemoveDeadBranches",
    "RemoveIdleExpands",
    "RemoveUnits",
    "ReturnToFloats",
    "RotateInAttention",
    "ScaleQueries",
    "SeparateBiases",
    "SeparateProjections",
    "SimplifyLookups",
    "SplitSkipNorms",
    "StateCacheSizes",
    "TransferWeights",
    "TransposeSingleQuery",
    "UsePaddingMask",
]
