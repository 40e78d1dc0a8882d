"""The neurons of models whose heads are not found are removed, and the shrunk graph computes the gated model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

from compressor.errors import ErrorCode, SiteRefusedError
from compressor.export import export_reference
from compressor.units import find_groups, gated, keep_all
from graph_passes import load, shrink
from tests.faults import fails_with
from tests.graph_passes.graphs import error, run
from tests.projection_zoo import WITHOUT_HEADS
from tests.random_plans import random_groups
from tests.zoo import pixels

TOLERANCE = 1e-4
BATCH, LENGTH = 3, 7


@pytest.mark.zoo
@pytest.mark.parametrize("name", WITHOUT_HEADS)
def test_neurons_of_a_model_without_heads_are_removed(name: str, tmp_path: Path) -> None:
    model, inputs = WITHOUT_HEADS[name].model(), WITHOUT_HEADS[name].inputs(BATCH, LENGTH)
    groups = find_groups(model, inputs)
    assert {group.type for group in groups} == {"neurons"}
    export_reference(model, keep_all(groups), inputs, tmp_path / "graph.onnx")
    for seed in range(3):
        plan = random_groups(groups, np.random.default_rng(seed))
        shrunk = shrink(load(tmp_path / "graph.onnx"), plan)
        assert not shrunk.refused
        assert sum(map(len, (removed.units for removed in shrunk.removed))) == plan.neurons - plan.neurons_kept
        assert shrunk.parameters[1] < shrunk.parameters[0]
        for batch in (BATCH, 2):
            feeds = WITHOUT_HEADS[name].inputs(batch, LENGTH)
            with torch.no_grad(), gated(model, plan):
                logits = model(**feeds).logits.numpy()
            read = {value.name for value in shrunk.model.graph.inputs}
            outputs = run(shrunk.model, {name: value.numpy() for name, value in feeds.items() if name in read})
            assert error(outputs, [logits]) <= TOLERANCE


def test_a_model_without_heads_and_neurons_is_refused() -> None:
    model = hf.ResNetModel(hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])).eval()
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, family="resnet"):
        find_groups(model, pixels())
