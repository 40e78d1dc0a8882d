"""ONNX in, ONNX out: shrink a transformer's graph by a plan. Imports neither torch nor compressor."""

from graph_passes.errors import GraphError, GraphPassError, PlanError, RefusedError
from graph_passes.plan import Kind, Plan, SitePlan

__all__ = ["GraphError", "GraphPassError", "Kind", "Plan", "PlanError", "RefusedError", "SitePlan"]
