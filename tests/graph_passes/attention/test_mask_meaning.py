"""What a mask means: padding, causality, both, or something that only pairs of positions can express."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graph_passes.attention.mask_meaning import MaskMeaning, mask_meaning
from tests.graph_passes.graphs import graph

LONGEST = 24

INPUTS = "int64[B, S] input_ids, int64[B, S] attention_mask"
WEIGHTS = (
    "int64 i0 = {0}, int64 i1 = {1}, int64[1] at1 = {1}, int64[2] at12 = {1, 2}, int64[1] at0 = {0}, "
    "int64 window = {16}, float zero = {0.0}, float lowest = {-3.4028234663852886e38}, float half = {0.5}"
)
POSITIONS = """
    s = Shape (input_ids) length = Gather (s, i1)
    row = Range (i0, length, i1) queries = Unsqueeze (row, at1) keys = Unsqueeze (row, at0)
"""
PADDING = "keep = Cast <to = 9> (attention_mask) padding = Unsqueeze (keep, at12)"
CAUSAL = "later = Greater (keys, queries) earlier = Not (later) causal = Unsqueeze (earlier, leading)"
LEADING = "int64[2] leading = {0, 1}"

MASKS: dict[str, tuple[str, tuple[str | None, bool] | None]] = {
    "padding": (f"{PADDING} mask = Identity (padding)", ("attention_mask", False)),
    "padding as numbers": (f"{PADDING} mask = Where (padding, zero, lowest)", ("attention_mask", False)),
    "causality": (f"{POSITIONS}{CAUSAL} mask = Identity (causal)", (None, True)),
    "padding and causality": (
        f"{PADDING}{POSITIONS}{CAUSAL} mask = And (padding, causal)",
        ("attention_mask", True),
    ),
    "nothing hidden": (
        f"{POSITIONS} any = GreaterOrEqual (keys, i0) mask = Unsqueeze (any, leading)",
        (None, False),
    ),
    "a window longer than the short runs": (
        f"""{POSITIONS} distance = Sub (queries, keys) near = Less (distance, window)
        mask = Unsqueeze (near, leading)""",
        None,
    ),
    "numbers other than zero for allowed pairs": (f"{PADDING} mask = Where (padding, half, lowest)", None),
    "another input": ("keep = Cast <to = 9> (input_ids) mask = Unsqueeze (keep, at12)", None),
}


def mask_graph(body: str) -> tuple[ir.Model, ir.Value]:
    model = graph(body, f"{WEIGHTS}, {LEADING}", inputs=INPUTS, outputs="bool[B, 1, N, S] mask")
    return model, model.graph.outputs[0]


@pytest.mark.parametrize("name", MASKS)
def test_padding_and_causality_are_recognized_at_every_length(name: str) -> None:
    body, expected = MASKS[name]
    model, mask = mask_graph(body)
    meaning = mask_meaning(model, mask, LONGEST)
    assert expected == (None if meaning is None else (meaning.padding and meaning.padding.name, meaning.causal))


def test_a_window_that_covers_every_position_has_no_effect() -> None:
    model, mask = mask_graph(MASKS["a window longer than the short runs"][0])
    assert mask_meaning(model, mask, 16) == MaskMeaning(None, causal=False)


@pytest.mark.parametrize(
    "op", ["mask = Softmax (mask4)", "mask = com.microsoft.Gelu (mask4)", "mask = Unknown (mask4)"]
)
def test_a_mask_that_is_too_expensive_or_cannot_be_evaluated_has_no_meaning(op: str) -> None:
    body = f"{PADDING} mask4 = Cast <to = 1> (padding) {op}"
    model, mask = mask_graph(body)
    assert mask_meaning(model, mask, LONGEST) is None
