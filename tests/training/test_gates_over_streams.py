"""Gates are learned with a model that reads its text in streams with a memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.config.methods import METHODS
from compressor.models.forwards import reader
from compressor.selection.learn import learn
from compressor.tasks.causal_lm import read
from compressor.units import gated
from tests import language
from tests.quick_cases import quick
from tests.selection.tiny import GATE_METHODS, selection
from tests.training.runs import have_same_weights, sites_of


@pytest.mark.parametrize("method", quick(GATE_METHODS, ("dsp",)))
def test_every_gate_keeps_exactly_the_requested_number(method: str, tmp_path: Path) -> None:
    """The result is that of the model with the gates of the plan, which reads the text with its memory."""
    folder, untrained = language.folder(), language.folder()
    data = language.data(tmp_path, folder, lines=30)
    options = {"optimizer": "lamb", "evaluations": 4, "gate_learning_rate": 0.5}
    config = selection(method=method, options=options, batch_size=3)
    learned = learn(folder.model, sites_of(folder), data, config, tmp_path / "run")
    assert learned.plan.heads_kept == 3
    assert have_same_weights(folder.model, untrained.model) != METHODS[method].trains_model
    metrics = [point.values["eval_perplexity"] for point in learned.curves if "eval_perplexity" in point.values]
    with gated(folder.model.eval(), learned.plan) as model:
        metric = data.task.score(read(data.task, data.eval, reader(model), streams=3))
    assert metric in [pytest.approx(value, rel=1e-5) for value in metrics]


@pytest.mark.zoo
def test_a_penalized_gate_ends_with_the_heads_that_it_left_open(tmp_path: Path) -> None:
    folder = language.folder()
    data, sites, kept = language.data(tmp_path, folder, lines=20), sites_of(folder), []
    for penalty in (0.0, 30.0):
        options = {
            "penalty": penalty,
            "penalty_warmup": 0,
            "cooldown": 0.5,
            "gate_learning_rate": 1.5,
            "optimizer": "lamb",
            "evaluations": 2,
        }
        config = selection(method="bin-concrete", keep=None, options=options, batch_size=3)
        learned = learn(folder.model, sites, data, config, tmp_path / f"{penalty}")
        kept.append(learned.plan.heads_kept)
        for site in learned.plan.sites:
            assert all(scale == pytest.approx(4 / len(site.kept)) for scale in site.scale)
        assert learned.curves[-1].values["overlap"] == 1.0
        assert "eval_perplexity" in learned.curves[-1].values
    assert kept[1] < kept[0]
