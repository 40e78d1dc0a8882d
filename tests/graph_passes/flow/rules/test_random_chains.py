"""For any chain from a weight to a gate and to the projection: shrunk equals gated, and only used columns remain; for
any chain of which some positions are read, these alone are computed, and stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import strategies as st

from graph_passes.flow.refusal import RefusalCode
from graph_passes.passes import DropUnreadPositions, Normalize
from tests.graph_passes.flow.rules.random_chains import Chain
from tests.graph_passes.graphs import Feeds, assert_same, draw, gated, plan, run_all, shape, shrink_and_compare, site

SIZES = ({"B": 2, "S": 3}, {"B": 3, "S": 1})
EXAMPLES = pytest.mark.parametrize("examples", [10, pytest.param(60, marks=pytest.mark.zoo)])


def colliding(chain: Chain) -> tuple[dict[str, int], ...]:
    """Sizes that differ, and as many rows and positions as there are heads, or as each head is wide."""
    return (*SIZES, *({"B": size, "S": size} for size in {chain.sizes["H"], chain.sizes["D"]}))


def check(property_of_data: Callable[[st.DataObject], None], examples: int) -> None:
    """Check a property of random data on some examples, always the same ones."""
    settings = hypothesis.settings(max_examples=examples, deadline=None, derandomize=True)

    @settings
    @hypothesis.given(data=st.data())
    def on_examples(data: st.DataObject) -> None:
        property_of_data(data)

    on_examples()


@EXAMPLES
def test_any_chain_between_weight_and_projection(examples: int) -> None:
    check(shrunk_equals_gated, examples)


@EXAMPLES
def test_any_chain_of_which_some_positions_are_read(examples: int) -> None:
    check(only_positions_that_are_read_are_computed, examples)


def shrunk_equals_gated(data: st.DataObject) -> None:
    numbers = st.integers
    chain = Chain(data.draw(numbers(2, 5)), data.draw(numbers(1, 5)), lambda low, high: data.draw(numbers(low, high)))
    for _ in range(data.draw(numbers(0, 7))):
        chain.move(linear=False)
    if data.draw(numbers(0, 2)) == 0:
        chain.attend(data.draw(numbers(0, 3)))
    chain.gate("a.head_gate")
    for _ in range(data.draw(numbers(0, 5))):
        chain.move(linear=True)
    chain.project()
    model = chain.model()
    heads = chain.sizes["H"]
    kept = sorted(data.draw(st.sets(numbers(0, heads - 1), min_size=1)))
    pruning = plan(site(kept, heads=heads, head_dim=chain.sizes["D"], scale=[0.5 + head for head in kept]))
    shrunk = shrink_and_compare(model, pruning, colliding(chain))
    if shrunk.refused:
        # Heads that are spread over several axes cannot be removed one by one.
        assert {refusal.op for refusal in shrunk.refused} == {"Reshape"}
        assert {refusal.code for refusal in shrunk.refused} == {RefusalCode.INSEPARABLE_HEADS}
        assert shrunk.parameters[0] == shrunk.parameters[1]
        return
    assert shape(shrunk.model, "W")[1] >= influential_columns(gated(model, pruning))


def only_positions_that_are_read_are_computed(data: st.DataObject) -> None:
    numbers = st.integers
    chain = Chain(data.draw(numbers(2, 5)), data.draw(numbers(1, 5)), lambda low, high: data.draw(numbers(low, high)))
    for _ in range(data.draw(numbers(0, 4))):
        chain.move(linear=False)
    chain.attend(data.draw(numbers(0, 4)))
    for _ in range(data.draw(numbers(0, 3))):
        chain.move(linear=False)
    chain.project()
    positions = data.draw(st.sampled_from(([0], [0, 1], [1], [2, 0])))
    chain.read(positions)
    model = chain.model()
    Normalize()(model)
    result = DropUnreadPositions()(model.clone())
    assert result.report, "the last product computes the positions that are read"
    sizes = [case for case in colliding(chain) if case["S"] > max(positions)]
    assert_same(result.model, model, sizes, 1e-5)


def influential_columns(model: ir.Model) -> int:
    """How many columns of the weight W change the output."""
    weight = model.graph.initializers.pop("W")
    content = weight.const_value
    assert content is not None
    weight.const_value = None
    model.graph.inputs.append(weight)
    feeds: Feeds = draw(model, SIZES[0])
    changed = [feeds["W"] + np.eye(1, content.shape.numpy()[1], k, np.float32) for k in range(content.shape.numpy()[1])]
    (before,), *after = run_all(model, [feeds, *({**feeds, "W": weight} for weight in changed)])
    return sum(not np.array_equal(output, before) for (output,) in after)
