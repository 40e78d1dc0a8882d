"""Every operator that has a rule loses exactly the units that it can lose, and computes what it computed with gates."""

from __future__ import annotations

import numpy as np
import pytest

from graph_passes.flow.rules import RULES
from graph_passes.passes import RemoveUnits
from tests.graph_passes.flow.rules.examples import EXAMPLES
from tests.graph_passes.flow.rules.gated_copies import cases, elements, evaluate, gated_copies


@pytest.mark.parametrize(("domain", "operator"), RULES)
def test_an_operator_without_dropped_units_equals_the_gated_one(domain: str, operator: str) -> None:
    examples = EXAMPLES.get((domain, operator), ())
    assert examples, f"add an example of {domain}:{operator} to tests/graph_passes/flow/rules/examples.py"
    for seed, example in enumerate(examples):
        gated, axes = gated_copies(example, seed)
        assert any((node.domain, node.op_type) == (domain, operator) for node in gated.graph), example.nodes
        pruned = gated.clone()
        report = RemoveUnits()(pruned).report
        refused = {site for refusal in report.refused for site in refusal.sites}
        assert sorted(set(axes) - refused) == sorted(example.cut.split()), example.nodes
        assert sorted({site for refusal in report.shared for site in refusal.sites}) == sorted(example.shared.split())
        for axis in example.cut.split():
            if axis not in (*example.shared.split(), *example.whole.split()):
                assert elements(pruned, axis) < elements(gated, axis), f"{axis} of {example.nodes}"
        feeds = cases(gated, ({"B": 2, "S": 5}, {"B": 3, "S": 4}))
        for outputs, expected in zip(evaluate(pruned, feeds), evaluate(gated, feeds), strict=True):
            for output, reference in zip(outputs, expected, strict=True):
                np.testing.assert_allclose(output, reference, rtol=1e-4, atol=1e-5, err_msg=example.nodes)


def test_every_example_has_a_rule() -> None:
    assert EXAMPLES.keys() <= RULES.keys()
