"""Training equals a plain loop over consecutive segments, resumes after an interruption, and stops if it diverges."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_optimizer import Lamb
from torch import nn

from compressor.errors import DivergedError, ErrorCode
from compressor.models.forwards import reader, tensors_of
from compressor.tasks.causal_lm import assign_streams, read
from compressor.training.fit import GateSetup, row_order
from tests import language
from tests.faults import fails_with
from tests.language import EndOfPowerError
from tests.training.gates import NoisyGate
from tests.training.runs import have_same_weights, sites_of, stop_after, train_model, without_times


@pytest.mark.parametrize("optimizer", ["lamb", pytest.param("adamw", marks=pytest.mark.zoo)])
def test_training_equals_a_plain_loop_over_consecutive_segments(optimizer: Any, tmp_path: Path) -> None:
    folder, by_hand = language.folder(**language.UNDROPPED), language.folder(**language.UNDROPPED)
    data = language.data(tmp_path, folder, lines=20)
    task = data.task
    schedule = language.schedule(optimizer=optimizer, weight_decay=0.0)
    order = assign_streams(len(data.train), 3, whole=False)
    assert len(order) < schedule.steps  # the text is read several times
    log = train_model(folder, data, schedule, tmp_path / "run")

    model = by_hand.model.train()
    plain: torch.optim.Optimizer = (
        Lamb(model.parameters(), adam_debias=True)
        if optimizer == "lamb"
        else torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    )
    losses, memories, best = [], None, (math.inf, dict[str, torch.Tensor]())
    for step in range(schedule.steps):
        batch = tensors_of(task.collate([data.train[int(row)] for row in order[step % len(order)]]))
        memories = None if step % len(order) == 0 else memories
        outputs = model(**batch, memories=memories)
        memories = outputs.memories
        outputs.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), schedule.max_grad_norm)
        for group in plain.param_groups:
            group["lr"] = schedule.learning_rate * schedule.pace(step)
        plain.step()
        plain.zero_grad()
        losses.append(outputs.loss.item())
        if (step + 1) % 3 == 0:
            metric = task.score(read(task, data.eval, reader(model.eval()), streams=3))
            best = min(best, (metric, {name: value.clone() for name, value in model.state_dict().items()}))
            model.train()
    assert [entry["loss"] for entry in log if "loss" in entry] == pytest.approx(losses, abs=1e-4)
    evaluations = [entry["eval_perplexity"] for entry in log if "eval_perplexity" in entry]
    assert (len(evaluations), min(evaluations)) == (4, pytest.approx(best[0], rel=1e-4))
    for name, weight in folder.model.state_dict().items():
        assert torch.allclose(weight, best[1][name], atol=1e-4), name


@pytest.mark.parametrize("stop", [*(pytest.param(stop, marks=pytest.mark.zoo) for stop in (2, 12)), 7])
def test_an_interrupted_training_with_a_gate_equals_the_uninterrupted_one(stop: int, tmp_path: Path) -> None:
    def setup(folder: Any) -> GateSetup:
        return GateSetup(NoisyGate(8, 3, 12), sites_of(folder))

    runs = []
    for name in ("whole", "resumed"):
        if name == "resumed":
            interrupted = language.folder()
            with pytest.raises(EndOfPowerError):
                train_model(
                    interrupted,
                    language.data(tmp_path, interrupted, lines=20),
                    language.schedule(),
                    tmp_path / name,
                    gating=setup(interrupted),
                    on_progress=stop_after(stop),
                )
            torch.rand(stop)  # other draws do not matter
        folder = language.folder()
        gating, evaluations = setup(folder), list[tuple[int, float]]()
        log = train_model(
            folder,
            language.data(tmp_path, folder, lines=20),
            language.schedule(),
            tmp_path / name,
            gating=gating,
            on_evaluation=lambda step, metric, seen=evaluations: seen.append((step, metric)),
        )
        runs.append((folder.model, gating.gate, without_times(log), evaluations))
    (whole, gate, log, evaluations), (resumed, resumed_gate, resumed_log, resumed_evaluations) = runs
    assert have_same_weights(whole, resumed)
    assert have_same_weights(gate, resumed_gate)
    assert log == resumed_log
    assert [step for step, _ in evaluations] == [3, 6, 9, 12]
    assert resumed_evaluations == evaluations[(stop - 1) // 3 :]
    entries = [entry for entry in log if "loss" in entry]
    assert [entry["gate"] for entry in entries] == [{"temperature": 1 - step / 12} for step in range(1, 13)]
    assert {len(entry["kept"]) for entry in entries} == {3}
    assert not hasattr(resumed, "head_gate")


def test_a_gate_trains_in_front_of_a_frozen_model(tmp_path: Path) -> None:
    folder, untrained, gate = language.folder(), language.folder(), NoisyGate(8, 3, 12)
    data = language.data(tmp_path, folder, lines=20)
    setup = GateSetup(gate, sites_of(folder), trains_model=False)
    train_model(folder, data, language.schedule(optimizer="adamw"), tmp_path / "run", gating=setup)
    assert have_same_weights(folder.model, untrained.model)
    assert all(weight.requires_grad and weight.grad is None for weight in folder.model.parameters())
    assert not torch.equal(gate.weight, NoisyGate(8, 3, 12).weight)


def test_no_checkpoint_counts_before_the_gate_has_settled(tmp_path: Path) -> None:
    folder, gate = language.folder(), NoisyGate(8, 3, 12)
    setup = GateSetup(gate, sites_of(folder))
    log = train_model(folder, language.data(tmp_path, folder), language.schedule(), tmp_path / "run", gating=setup)
    chosen = {entry["step"]: entry["eval_chosen"] for entry in log if "eval_chosen" in entry}
    assert [math.isfinite(chosen[step]) for step in (3, 6, 9, 12)] == [False, False, False, True]


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_its_checkpoints(tmp_path: Path) -> None:
    folder, whole, resumed = language.folder(), language.folder(), language.folder()
    data, path = language.data(tmp_path, folder, lines=20), tmp_path / "run"
    expected = train_model(whole, data, language.schedule(), tmp_path / "whole")

    def overwrite_weights(finished: int, total: int) -> None:
        if finished == 7:
            with torch.no_grad():
                next(folder.model.parameters()).fill_(math.inf)

    details = {"step": 8, "quantity": "loss", "checkpoint": path / "checkpoint-6"}
    with fails_with(ErrorCode.NOT_FINITE, DivergedError, **details):
        train_model(folder, data, language.schedule(), path, on_progress=overwrite_weights)
    log = train_model(resumed, data, language.schedule(), path)
    assert without_times(log) == without_times(expected)
    assert have_same_weights(resumed.model, whole.model)


def test_a_gradient_that_is_not_finite_changes_no_weight(tmp_path: Path) -> None:
    folder, untrained = language.folder(), language.folder()
    data = language.data(tmp_path, folder)
    folder.model.model.norm.bias.register_hook(lambda gradient: gradient * math.inf)
    details = {"step": 1, "quantity": "gradient norm", "checkpoint": None}
    with fails_with(ErrorCode.NOT_FINITE, DivergedError, **details):
        train_model(folder, data, language.schedule(), tmp_path / "run")
    assert have_same_weights(folder.model, untrained.model)


def test_a_weight_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    folder = language.folder()
    data, name = language.data(tmp_path, folder), "model.norm.bias"

    def overwrite_weights(finished: int, total: int) -> None:
        if finished == 6:
            with torch.no_grad():
                folder.model.get_parameter(name).fill_(math.inf)

    details = {"step": 6, "quantity": f"weight {name}", "value": math.inf, "checkpoint": tmp_path / "checkpoint-3"}
    with fails_with(ErrorCode.NOT_FINITE, DivergedError, **details):
        train_model(folder, data, language.schedule(), tmp_path, on_progress=overwrite_weights)


def test_the_message_of_a_divergence_names_a_remedy_and_the_last_checkpoint(tmp_path: Path) -> None:
    folder = language.folder()
    data = language.data(tmp_path, folder)
    with torch.no_grad():
        next(folder.model.parameters()).fill_(math.nan)
    with pytest.raises(DivergedError) as error:
        train_model(folder, data, language.schedule(), tmp_path / "run")
    assert str(error.value) == (
        "step 1: the loss is nan; lower the learning rate (--learning-rate) or lengthen its warm-up"
        " (--options warmup=0.2); there is no checkpoint yet"
    )


def test_training_leaves_the_random_generators_as_they_were(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(1).item()

    def seed(value: int) -> None:
        random.seed(value)
        np.random.seed(value)
        torch.manual_seed(value)

    seed(5)
    expected = draw()
    folder = language.folder()
    data = language.data(tmp_path, folder)
    seed(5)
    train_model(folder, data, language.schedule(), tmp_path / "run")
    assert draw() == expected


def test_every_epoch_visits_each_row_once_in_batches_of_similar_length() -> None:
    lengths = [1 + row % 40 for row in range(400)]
    order = row_order(lengths, batch_size=8, batches=100, seed=0)
    assert sorted(order[:400]) == sorted(order[400:]) == list(range(400))
    batches = [[lengths[row] for row in order[start : start + 8]] for start in range(0, len(order), 8)]
    spread = [max(batch) - min(batch) for batch in batches]
    assert sum(spread) / len(spread) < 3
    assert order == row_order(lengths, 8, 100, 0) != row_order(lengths, 8, 100, 1)
