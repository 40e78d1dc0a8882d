"""`Rule.carries` lists the output axes that carry an input axis; it must agree with `Rule.demand`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.indices import Need, all_indices, same_index
from graph_passes.flow.rule import NoRuleError, Rule, RuleContext
from graph_passes.flow.rules import RULES
from graph_passes.passes import Normalize
from tests.graph_passes.flow.rules.random_chains import Chain
from tests.graph_passes.fused_layers import FUSED
from tests.graph_passes.graphs import graph
from tests.graph_passes.layers import LAYERS
from tests.quick_cases import quick

Axes = set[tuple[int, int]]
"""Output axes as (output, axis)."""


class Sample:
    """One graph, its nodes that have rules, and the input axes that can hold heads."""

    def __init__(self, model: ir.Model) -> None:
        Normalize()(model)
        self.model = model
        self.context = RuleContext(Probe(model))

    def axes(self) -> Iterator[tuple[ir.Node, Rule, int, int]]:
        for node in self.model.graph:
            rule = RULES.get((node.domain, node.op_type))
            for position, value in enumerate(node.inputs):
                for axis in range(len(self.context.probe.shape(value) or ())):
                    if rule is not None and not self.mixes(node, rule, position, axis):
                        yield node, rule, position, axis

    def mixes(self, node: ir.Node, rule: Rule, position: int, axis: int) -> bool:
        try:
            return rule.mixes(node, position, axis, self.context)
        except NoRuleError:
            return True

    def carried(self, node: ir.Node, rule: Rule, position: int, axis: int) -> Axes:
        """Axes that the rule names, without axes of one index."""
        try:
            pairs = list(rule.carries(node, position, axis, self.context))
        except NoRuleError:
            return set()
        return {(output, output_axis) for output, output_axis in pairs if self.size(node, output, output_axis) > 1}

    def demanded(self, node: ir.Node, rule: Rule, position: int, axis: int) -> Axes:
        """Output axes on which a single index needs other indices of the input axis than the whole axis does."""
        full: list[Need] = [all_indices(len(self.context.probe.shape(value) or ())) for value in node.outputs]
        carriers: Axes = set()
        for output, need in enumerate(full):
            for output_axis in range(len(need)):
                size = self.size(node, output, output_axis)
                for index in range(size if size > 1 else 0):
                    single = list(full)
                    single[output] = tuple(
                        np.array([index]) if output_axis == entry else None for entry in range(len(need))
                    )
                    with contextlib.suppress(NoRuleError):
                        single_need, full_need = (
                            rule.demand(node, needs, self.context).inputs[position] for needs in (single, full)
                        )
                        if single_need and full_need and not same_index(single_need[axis], full_need[axis]):
                            carriers.add((output, output_axis))
        return carriers

    def size(self, node: ir.Node, output: int, axis: int) -> int:
        shape = self.context.probe.shape(node.outputs[output]) or ()
        return shape[axis] if axis < len(shape) else 0


def assert_agrees(model: ir.Model) -> None:
    sample = Sample(model)
    for node, rule, position, axis in sample.axes():
        location = (node.op_type, position, axis)
        assert sample.carried(node, rule, position, axis) == sample.demanded(node, rule, position, axis), location


@pytest.mark.parametrize("name", quick([*LAYERS, *FUSED], [*list(LAYERS)[::2], *list(FUSED)[::3]]))
def test_carried_axes_equal_the_demanded_axes(name: str) -> None:
    assert_agrees((LAYERS | FUSED)[name].graph())


@pytest.mark.parametrize("seed", quick(range(20), range(4)))
def test_carried_axes_equal_the_demanded_axes_in_any_chain(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chain = Chain(int(rng.integers(2, 5)), int(rng.integers(1, 5)), lambda low, high: int(rng.integers(low, high + 1)))
    for _ in range(8):
        chain.move(linear=False)
    chain.project()
    assert_agrees(chain.model())


CASES: dict[str, tuple[str, str, list[Axes]]] = {
    "a transpose permutes the axes": ("y = Transpose <perm = [2, 0, 1]> (x)", "", [{(0, 1)}, {(0, 2)}, {(0, 0)}]),
    "a sum ends the last axis": ("y = MatMul (x, W)", "float[8, 4] W", [{(0, 0)}, {(0, 1)}, set()]),
    "a split divides one axis, which every output carries": (
        "y, z = Split <axis = 2, num_outputs = 2> (x)",
        "",
        [set(), set(), {(0, 2), (1, 2)}],
    ),
    "a reshape spreads one axis over two": (
        "y = Reshape (x, four)",
        "int64[4] four = {0, 0, 4, 2}",
        [{(0, 0)}, {(0, 1)}, {(0, 2), (0, 3)}],
    ),
    "a lookup of one index ends an axis": (
        "y = Gather <axis = 2> (x, i)",
        "int64 i = {3}",
        [{(0, 0)}, {(0, 1)}, set()],
    ),
    "a join passes every axis on": ("y = Concat <axis = 2> (x, x)", "", [{(0, 0)}, {(0, 1)}, {(0, 2)}]),
    "sizes carry nothing": ("y = Shape (x)", "", [set(), set(), set()]),
}


@pytest.mark.parametrize("name", CASES)
def test_axes_that_an_operator_carries(name: str) -> None:
    body, weights, expected = CASES[name]
    sample = Sample(graph(body, weights))
    node = sample.model.graph[0]
    rule = RULES["", node.op_type]
    assert [sample.carried(node, rule, 0, axis) for axis in range(3)] == expected
