"""What a rewritten graph no longer reads is named; nodes in between and constants are not."""

from __future__ import annotations

import pytest

from compressor.targets.lost_dependencies import lost_dependencies
from tests.targets.graphs import parsed

INPUTS = "float[B, 8] x, float[B, 8] m"
NORM = "com.microsoft.SkipLayerNormalization"


@pytest.mark.parametrize(
    ("after", "lost"),
    [
        ("h = Mul(x, m)  y = Add(h, m)", []),
        ("t = Neg(x)  s = Neg(t)  h = Mul(s, m)  y = Add(h, m)", []),
        ("h = Neg(x)  y = Add(h, m)", ["m -> h"]),
        ("h = Mul(x, m)  y = Add(h, x)", ["m -> y"]),
        ("y = Mul(x, m)", ["h -> y"]),
    ],
)
def test_lost_dependencies_are_named(after: str, lost: list[str]) -> None:
    before, rewritten = (parsed(body, INPUTS, "float[B, 8] y") for body in ("h = Mul(x, m)  y = Add(h, m)", after))
    assert lost_dependencies(before, rewritten) == lost


def test_omitted_outputs_and_constants_are_not_compared() -> None:
    body = f"h, , , s = {NORM}(x, m, w)  k, , , t = {NORM}(h, s, w)  y = Add(k, t)"
    graphs = (parsed(body, INPUTS, "float[B, 8] y", "float[8] w") for _ in range(2))
    assert lost_dependencies(*graphs) == []
