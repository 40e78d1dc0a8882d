"""A masked graph records the longest inputs that its masks cover."""

from __future__ import annotations

import json

import numpy as np
import pytest

from graph_passes import BlockMask, Kind, Plan, SitePlan
from graph_passes.block_sparse.masks import REACH
from graph_passes.passes import RecordReach
from tests.graph_passes.graphs import graph
from tests.graph_passes.passes.checks import assert_untouched, rewritten

TOKENS = "float[B, S] input_ids"
TARGET = f"{TOKENS}, float[B, T] decoder_input_ids"


def masked(*sites: tuple[Kind, BlockMask]) -> Plan:
    """A plan of one site for each kind and mask."""
    plans = tuple(SitePlan(f"s{n}", kind, 1, 1, 4, (0,)) for n, (kind, _) in enumerate(sites))
    return Plan(sites=plans).masked({plan.name: mask for plan, (_, mask) in zip(plans, sites, strict=True)})


def mask(rows: int, columns: int, memory: int = 0) -> BlockMask:
    return BlockMask(np.ones((1, rows, columns), np.bool_), 8, memory)


@pytest.mark.parametrize(
    ("inputs", "plan", "reach"),
    [
        (TOKENS, masked(("bidirectional", mask(4, 4))), {"input_ids": 32}),
        (TOKENS, masked(("causal", mask(4, 4)), ("causal", mask(3, 3))), {"input_ids": 24}),
        (
            TARGET,
            masked(("bidirectional", mask(4, 4)), ("causal", mask(2, 2))),
            {"input_ids": 32, "decoder_input_ids": 16},
        ),
        (TARGET, masked(("cross", mask(2, 3))), {"decoder_input_ids": 16, "input_ids": 24}),
        (
            "float[B, 3, H, W] pixel_values, float[B, T] decoder_input_ids",
            masked(("bidirectional", mask(4, 4)), ("cross", mask(2, 4))),
            {"decoder_input_ids": 16},
        ),
        (
            f"{TOKENS}, float[B, M, 8] memory_0, float[B, M, 8] memory_1",
            masked(("causal", mask(3, 4, memory=8))),
            {"input_ids": 24, "memory_0": 8, "memory_1": 8},
        ),
    ],
)
def test_the_shortest_reach_of_each_input_is_recorded(inputs: str, plan: Plan, reach: dict[str, int]) -> None:
    model = graph(
        "y = Relu(input_ids)" if "input_ids" in inputs.split("decoder")[0] else "y = Relu(decoder_input_ids)",
        inputs=inputs,
        outputs="float[B, N] y",
    )
    sizes = [{"B": 2, "S": 5, "T": 4, "M": 3, "H": 2, "W": 2}]
    result = rewritten(RecordReach(plan), model, sizes=sizes, tolerance=0)
    assert result.report == reach
    assert json.loads(result.model.metadata_props[REACH]) == reach


def test_a_plan_without_masks_records_nothing() -> None:
    plan = Plan(sites=(SitePlan("a", "causal", 1, 1, 4, (0,)),))
    model = graph("y = Relu(input_ids)", inputs=TOKENS, outputs="float[B, S] y")
    assert assert_untouched(RecordReach(plan), model) == {}
