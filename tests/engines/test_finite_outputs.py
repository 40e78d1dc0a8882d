"""Outputs that overflow are refused by the name of the module where they do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compressor.engines.prove_export import first_not_finite, require_defined
from compressor.errors import ErrorCode
from compressor.targets.relative_error import is_defined
from tests import folders
from tests.faults import fails_with
from tests.zoo import text

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("module", ["bert.embeddings.LayerNorm", "bert.encoder.layer.0.output.dense", "classifier"])
def test_the_first_module_that_overflows_is_named(module: str) -> None:
    model, inputs = folders.bert().eval(), {name: ids % 9 for name, ids in text().items()}
    with torch.no_grad():
        outputs = {"logits": model(**inputs).logits.numpy()}
        require_defined(model, inputs, outputs)
        assert first_not_finite(model, inputs) is None
        model.get_submodule(module).bias.fill_(INF)
        overflown = {"logits": model(**inputs).logits.numpy()}
        with fails_with(ErrorCode.NOT_FINITE, module=module, output="logits"):
            require_defined(model, inputs, overflown)
    assert not any(part._forward_hooks for part in model.modules())


@pytest.mark.parametrize(
    ("values", "defined"),
    [([1, 2, 3], True), ([1, INF, -INF], True), ([1, 2, NAN], False), ([INF, -INF, INF], False), ([], True)],
)
def test_infinities_beside_finite_values_are_outputs(values: list[float], defined: bool) -> None:
    assert is_defined(np.array([values]), {}) is defined


def test_padding_may_hold_anything() -> None:
    mask = np.array([[1, 1, 0]])
    output = np.array([[[1.0], [2.0], [NAN]]])
    assert is_defined(output, {"attention_mask": mask})
    assert not is_defined(output, {"attention_mask": np.ones_like(mask)})
