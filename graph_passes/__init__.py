"""Shrink the ONNX graph of a transformer by a plan. The package imports neither torch nor compressor."""

from graph_passes.attention.find import GraphSite, find_attention
from graph_passes.attention.find_groups import GraphGroup, GraphGroups
from graph_passes.block_sparse.masks import BlockMask
from graph_passes.errors import GraphError, GraphErrorCode, GraphPassError, PlanError
from graph_passes.files import data_files, load, save
from graph_passes.flow.refusal import Refusal, RefusalCode
from graph_passes.flow.sizes import record_example_sizes
from graph_passes.plan import GroupPlan, Kind, NeuronPlan, Plan, SitePlan
from graph_passes.shrink import GroupRemoval, Shrunk, count_parameters, find_groups, gate_groups, shrink
from graph_passes.weights import WEIGHTS, WeightFile

__all__ = [
    "WEIGHTS",
    "BlockMask",
    "GraphError",
    "GraphErrorCode",
    "GraphGroup",
    "GraphGroups",
    "GraphPassError",
    "GraphSite",
    "GroupPlan",
    "GroupRemoval",
    "Kind",
    "NeuronPlan",
    "Plan",
    "PlanError",
    "Refusal",
    "RefusalCode",
    "Shrunk",
    "SitePlan",
    "WeightFile",
    "count_parameters",
    "data_files",
    "find_attention",
    "find_groups",
    "gate_groups",
    "load",
    "record_example_sizes",
    "save",
    "shrink",
]
