"""Record the reach of block masks: the longest inputs that a masked graph is valid for, in its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graph_passes.block_sparse.masks import REACH
from graph_passes.passes.base import GraphPass, ReportedResult
from graph_passes.plan import Kind, Plan

_ENCODER_FEATURES = frozenset(("pixel_values", "input_features", "input_values"))
"""Names of the inputs of image and audio encoders."""


class RecordReach(GraphPass[Mapping[str, int]]):
    """Write the number of positions that the masks of a plan cover into the metadata `REACH`, as JSON.

    The inputs are tokens `[batch, position]` and memories `[batch, position, hidden]`.

    Cases:
        1. The plan has masks: an input gets the smallest reach of the sites whose queries or keys are its positions.
           In a model that also takes images or sounds, the encoder of a site is unknown, so encoders set no reach.
        2. The plan has no masks: the graph stays as it is.

    The report has the number of positions that the masks cover, by name of the input.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def call(self, model: ir.Model) -> ReportedResult[Mapping[str, int]]:
        if not self.plan.masks:
            return ReportedResult(model, False, {})
        positions = _reach(self.plan, [str(value.name) for value in model.graph.inputs])
        text = json.dumps(positions)
        modified = model.metadata_props.get(REACH) != text
        model.metadata_props[REACH] = text
        return ReportedResult(model, modified, positions)


def _reach(plan: Plan, inputs: Sequence[str]) -> dict[str, int]:
    """The reach of each input, case 1."""
    reach: dict[str, int] = {}
    for site in plan.sites:
        mask = plan.masks.get(site.name)
        if mask is None:
            continue
        queries, keys = _token_inputs(site.kind, inputs)
        sizes = [(queries, mask.queries), (keys, mask.keys)]
        sizes += [(name, mask.memory) for name in inputs if name.startswith("memory_")]
        for name, size in sizes:
            if name in inputs:
                reach[name] = min(size, reach.get(name, size))
    return reach


def _token_inputs(kind: Kind, inputs: Sequence[str]) -> tuple[str, str]:
    """The inputs whose positions are the queries and the keys of a site; empty where unknown."""
    target = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    source = "" if _ENCODER_FEATURES.intersection(inputs) else "input_ids"
    queries = source if kind == "bidirectional" else target
    return queries, source if kind == "cross" else queries
