"""Learning gives exact and reproducible plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.config.methods import METHODS
from compressor.errors import ErrorCode, UsageError
from compressor.selection.learn import learn
from compressor.selection.options import heads_to_keep
from compressor.selection.subset_evaluator import ModelSubsetEvaluator
from tests.faults import fails_with
from tests.selection import tiny
from tests.selection.tiny import GATE_METHODS, HEAD_METHODS, selection


def plan_bytes(learned: tiny.SelectedPlan, folder: Path) -> bytes:
    learned.plan.save(folder / "plan.json")
    return (folder / "plan.json").read_bytes()


@pytest.mark.parametrize(
    ("keep", "method"),
    [
        pytest.param(keep, method, marks=() if keep == 3 or method == "dsp" else pytest.mark.zoo)
        for keep in (1, 3, tiny.HEADS, "50%")
        for method in HEAD_METHODS
    ],
)
def test_every_method_keeps_exactly_k(method: str, keep: int | str, tmp_path: Path) -> None:
    learned = tiny.learn_plan(tmp_path, selection(method=method, keep=keep, training_steps=2))
    count = heads_to_keep(keep, tiny.HEADS)
    assert learned.plan.heads_kept == (count + count % 2 if method == "global" else count)  # an index has two heads
    assert learned.plan.method == method
    assert learned.plan.data == "sha256:rows"
    for site in learned.plan.sites:
        scale = site.heads / max(1, len(site.kept)) if method == "bin-concrete" else 1.0
        assert all(head_scale == pytest.approx(scale) for head_scale in site.scale)


def test_the_same_seed_gives_the_same_plan_and_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    models = tiny.classifier(), tiny.classifier()
    first = tiny.learn_plan(tmp_path / "1", selection(training_steps=6), model=models[0])
    torch.rand(5)  # other draws do not matter
    second = tiny.learn_plan(tmp_path / "2", selection(training_steps=6), model=models[1])
    assert plan_bytes(first, tmp_path) == plan_bytes(second, tmp_path)
    assert first.curves == second.curves
    assert tiny.have_same_weights(*models)


def test_the_seed_matters(tmp_path: Path) -> None:
    configs = [selection(seed=seed, training_steps=2) for seed in (1, 2)]
    first, second = (tiny.learn_plan(tmp_path / str(config.seed), config).curves[0] for config in configs)
    assert first != second


def test_curves_show_loss_temperature_and_overlap(tmp_path: Path) -> None:
    learned = tiny.learn_plan(tmp_path)
    last = learned.curves[-1].values
    assert {"loss", "learning_rate", "temperature", "overlap", "eval_accuracy"} <= set(last)
    assert last["temperature"] == 1e-8
    assert all(0 <= point.values["overlap"] <= 1 for point in learned.curves)


def test_only_the_weights_of_the_model_change(tmp_path: Path) -> None:
    model = tiny.classifier()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config, modules = model.config.to_dict(), [name for name, _ in model.named_modules()]
    learned = tiny.learn_plan(tmp_path, model=model)
    assert learned.trained
    assert list(model.state_dict()) == list(before)
    assert model.config.to_dict() == config
    assert [name for name, _ in model.named_modules()] == modules
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert model.training
    assert not all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_bf16_products_leave_float32_weights(tmp_path: Path) -> None:
    whole, half, repeated = tiny.classifier(), tiny.classifier(), tiny.classifier()
    config = selection(training_steps=3, options={"mixed_precision": "bf16"})
    tiny.learn_plan(tmp_path / "whole", selection(training_steps=3), whole)
    learned = tiny.learn_plan(tmp_path / "half", config, half)
    assert learned.plan.heads_kept == 3
    assert all(weight.dtype == torch.float32 for weight in half.parameters())
    assert not tiny.have_same_weights(whole, half)
    plain, inputs = tiny.classifier(), {"input_ids": torch.arange(16).reshape(2, 8)}
    plain.load_state_dict(half.state_dict())
    with torch.no_grad():  # later stages, such as export, compute in full precision again
        assert torch.equal(plain.eval()(**inputs).logits, half.eval()(**inputs).logits)
    assert plan_bytes(tiny.learn_plan(tmp_path / "again", config, repeated), tmp_path) == plan_bytes(learned, tmp_path)
    assert tiny.have_same_weights(half, repeated)


def test_a_pipelined_method_does_not_change_the_model(tmp_path: Path) -> None:
    model, untouched = tiny.classifier(), tiny.classifier()
    config = selection(method="dsp-pipelined", options={"evaluations": 2})
    expected = tiny.learn_plan(tmp_path / "alone", config)
    tiny.learn_plan(tmp_path / "run", config.model_copy(update={"method": "dsp"}))  # writes checkpoints of another run
    learned = tiny.learn_plan(tmp_path / "run", config, model)
    assert not learned.trained
    assert plan_bytes(learned, tmp_path) == plan_bytes(expected, tmp_path)
    assert tiny.have_same_weights(model, untouched)
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    state = torch.load(tmp_path / "run" / "checkpoint-12" / "optimizer.pt", weights_only=True)
    assert [len(group["params"]) for group in state["param_groups"]] == [1]  # the weights of the gate
    assert state["state"][0]["exp_avg"].abs().min() > 0


@pytest.mark.parametrize("method", GATE_METHODS)
def test_each_kind_of_site_keeps_its_share(method: str, tmp_path: Path) -> None:
    model = tiny.classifier()
    first, second = tiny.sites_of(model)
    sites = [replace(first, kind="bidirectional"), replace(second, kind="causal")]
    config = selection(method=method, keep=5, training_steps=2, options={"pool": "kind"})
    learned = learn(model, sites, tiny.data(), config, tmp_path)
    assert [len(site.kept) for site in learned.plan.sites] == [3, 2]
    assert learned.trained == METHODS[method].trains_model


@pytest.mark.parametrize("method", HEAD_METHODS)
def test_only_the_heads_of_the_pool_compete(method: str, tmp_path: Path) -> None:
    model = tiny.classifier()
    first, second = tiny.sites_of(model)
    sites = [replace(first, kind="causal"), replace(second, kind="cross")]
    config = selection(method=method, keep="25%", training_steps=2, options={"pool": "cross"})
    plan = learn(model, sites, tiny.data(), config, tmp_path).plan
    assert [len(site.kept) for site in plan.sites] == [4, 1]
    assert set(plan.sites[0].scale) == {1.0}


@pytest.mark.parametrize("method", ["hard-concrete", "bin-concrete"])
def test_penalised_gates_settle_and_the_model_trains_with_the_kept_heads(method: str, tmp_path: Path) -> None:
    options = {"cooldown": 0.5, "penalty": 0.1, "points": 12, "evaluations": 2}
    learned = tiny.learn_plan(tmp_path, selection(method=method, keep=2, options=options))
    values = {point.step: point.values for point in learned.curves}
    assert all({"open", "expected", "overlap"} <= set(readings) for readings in values.values())
    assert {values[step]["overlap"] for step in range(6, 13)} == {1.0}
    assert len({values[step]["expected"] for step in range(1, 7)}) == 6
    assert {values[step]["expected"] for step in range(6, 13)} == {values[6]["expected"]}


def test_the_checkpoint_of_the_smallest_loss_is_used(tmp_path: Path) -> None:
    model, task = tiny.language_model(), tiny.NextToken()
    config = selection(training_steps=8, options={"evaluations": 4, "cooldown": 0.5})
    learned = tiny.learn_plan(tmp_path, config, model, task)
    losses = [point.values["eval_loss"] for point in learned.curves if "eval_loss" in point.values]
    evaluator = ModelSubsetEvaluator(model, tiny.sites_of(model), tiny.data(task), 12, 0)
    kept = frozenset((site.name, head) for site in learned.plan.sites for head in site.kept)
    assert -evaluator.evaluate(kept) == pytest.approx(min(losses[1:]), rel=1e-5)


def test_the_loss_falls(tmp_path: Path) -> None:
    learned = tiny.learn_plan(tmp_path, selection(training_steps=60, batch_size=8, learning_rate=1e-2))
    losses = [point.values["loss"] for point in learned.curves if "loss" in point.values]
    assert sum(losses[-5:]) / 5 < 0.5 * sum(losses[:5]) / 5


def test_epochs_are_converted_to_steps(tmp_path: Path) -> None:
    learned = tiny.learn_plan(tmp_path, selection(training_steps=None, epochs=0.5, batch_size=8))
    assert learned.curves[-1].step == 4  # 30 of 60 rows, 8 per step


@pytest.mark.parametrize(("method", "steps"), [("dsp", 9), ("dsp-pipelined", 3)])
def test_epochs_default_to_the_number_of_the_paper(method: str, steps: int, tmp_path: Path) -> None:
    learned = tiny.learn_plan(tmp_path, selection(method=method, training_steps=None, epochs=None, batch_size=20))
    assert learned.curves[-1].step == steps


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"keep": 9}, ErrorCode.OUT_OF_RANGE, "keep"),
        ({"options": {"tau": 1}}, ErrorCode.UNKNOWN_NAME, "tau"),
        ({"method": "taylor", "options": {"tau": 1}}, ErrorCode.UNKNOWN_NAME, "tau"),
        ({"options": {"tau_ini": "hot"}}, ErrorCode.INVALID_VALUE, "tau_ini"),
        ({"options": {"evaluations": 0}}, ErrorCode.OUT_OF_RANGE, "evaluations"),
        ({"options": {"final_learning_rate": 1.0}}, ErrorCode.OUT_OF_RANGE, "final_learning_rate"),
        ({"options": {"pool": "cross"}}, ErrorCode.UNSUPPORTED_MODEL, "pool"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], code: ErrorCode, field: str, tmp_path: Path) -> None:
    with fails_with(code, UsageError, field=field):
        tiny.learn_plan(tmp_path, selection(**fields))
    assert not any(tmp_path.iterdir())


class Perplexity(tiny.NextToken):
    """A task whose score is another metric than the one that selects heads."""

    metrics = (replace(tiny.NextToken.metrics[0], name="perplexity"),)

    @property
    def chooser(self) -> tiny.NextToken:
        return tiny.NextToken()


def test_a_loss_of_another_metric_cannot_end_a_search(tmp_path: Path) -> None:
    model = tiny.language_model()
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field="keep", metric="perplexity"):
        tiny.learn_plan(tmp_path, selection(method="local", keep=None, max_drop=0.1), model, Perplexity())
