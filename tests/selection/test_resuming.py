"""An interrupted training of gates gives the same plan and weights as an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from compressor.progress import ProgressCallback
from tests.selection import tiny
from tests.selection.test_learn import plan_bytes
from tests.selection.tiny import GATE_METHODS, selection

OPTIONS = {"evaluations": 4}  # every third of twelve steps writes a checkpoint


class EndOfPowerError(Exception):
    """Ends a run early."""


def stop_after(step: int) -> ProgressCallback:
    def on_progress(finished: int, total: int) -> None:
        if finished == step:
            raise EndOfPowerError

    return on_progress


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, object, torch.nn.Module]:
    """Plan, curves and weights of a run of `dsp`."""
    folder, model = tmp_path_factory.mktemp("uninterrupted"), tiny.classifier()
    learned = tiny.learn_plan(folder / "run", selection(options=OPTIONS), model)
    return plan_bytes(learned, folder), learned.curves, model


@pytest.mark.parametrize("step", [3, *(pytest.param(step, marks=pytest.mark.zoo) for step in (1, 4, 11, 12))])
def test_a_run_that_is_interrupted_at_any_step_resumes(
    step: int, uninterrupted: tuple[bytes, object, torch.nn.Module], tmp_path: Path
) -> None:
    config, resumed, steps = selection(options=OPTIONS), tiny.classifier(), list[int]()
    with pytest.raises(EndOfPowerError):
        tiny.learn_plan(tmp_path / "run", config, on_progress=stop_after(step))
    torch.rand(step)  # other draws do not matter
    learned = tiny.learn_plan(tmp_path / "run", config, resumed, on_progress=lambda done, total: steps.append(done))
    plan, curves, weights = uninterrupted
    assert steps[0] == (step - 1) // 3 * 3 + 1  # the step after the last checkpoint
    assert plan_bytes(learned, tmp_path) == plan
    assert learned.curves == curves
    assert tiny.have_same_weights(weights, resumed)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=() if method in ("dsp-pipelined", "hard-concrete") else pytest.mark.zoo)
        for method in GATE_METHODS
        if method != "dsp"
    ],
)
def test_every_gate_resumes(method: str, tmp_path: Path) -> None:
    config, uninterrupted_model, resumed_model = (
        selection(method=method, training_steps=6, options={"evaluations": 2}),
        *_two_models(),
    )
    expected = tiny.learn_plan(tmp_path / "whole", config, uninterrupted_model)
    with pytest.raises(EndOfPowerError):
        tiny.learn_plan(tmp_path / "run", config, on_progress=stop_after(5))
    learned = tiny.learn_plan(tmp_path / "run", config, resumed_model)
    assert plan_bytes(learned, tmp_path) == plan_bytes(expected, tmp_path)
    assert learned.curves == expected.curves
    assert tiny.have_same_weights(uninterrupted_model, resumed_model)


def test_tied_weights_stay_tied_after_an_interruption(tmp_path: Path) -> None:
    config, task = selection(training_steps=8, options={"evaluations": 4, "cooldown": 0.5}), tiny.NextToken()
    uninterrupted_model, resumed_model = tiny.language_model(), tiny.language_model()
    expected = tiny.learn_plan(tmp_path / "whole", config, uninterrupted_model, task)
    with pytest.raises(EndOfPowerError):
        tiny.learn_plan(tmp_path / "run", config, tiny.language_model(), task, stop_after(7))
    learned = tiny.learn_plan(tmp_path / "run", config, resumed_model, task)
    assert plan_bytes(learned, tmp_path) == plan_bytes(expected, tmp_path)
    assert tiny.have_same_weights(uninterrupted_model, resumed_model)
    assert resumed_model.get_output_embeddings().weight is resumed_model.get_input_embeddings().weight


def test_an_incomplete_checkpoint_is_ignored(
    uninterrupted: tuple[bytes, object, torch.nn.Module], tmp_path: Path
) -> None:
    config = selection(options=OPTIONS)
    with pytest.raises(EndOfPowerError):
        tiny.learn_plan(tmp_path / "run", config, on_progress=stop_after(8))
    incomplete = tmp_path / "run" / "checkpoint-9"
    incomplete.mkdir()
    (incomplete / "trainer_state.json").write_text('{"global_step": 9, ')
    assert tiny.learn_plan(tmp_path / "run", config).curves == uninterrupted[1]


def test_checkpoints_of_another_run_are_discarded(tmp_path: Path) -> None:
    expected = tiny.learn_plan(tmp_path / "alone", selection(seed=5, training_steps=4))
    tiny.learn_plan(tmp_path / "run", selection(seed=4, training_steps=4))
    assert tiny.learn_plan(tmp_path / "run", selection(seed=5, training_steps=4)).curves == expected.curves


def _two_models() -> tuple[PreTrainedModel, PreTrainedModel]:
    return tiny.classifier(), tiny.classifier()
