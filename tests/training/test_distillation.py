"""The loss of distillation: zero for the teacher itself, blind to padding and labels, and learned by training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.config.sections import RowsConfig
from compressor.errors import DivergedError, ErrorCode, InputError
from compressor.model_folder import load
from compressor.tasks import open_data
from compressor.training import precision
from compressor.training.distillation import Distillation
from compressor.training.trainer import WEIGHTS
from tests import folders, zoo
from tests.faults import fails_with
from tests.language import EndOfPowerError
from tests.quick_cases import quick
from tests.run.runs import write_inputs
from tests.tasks import questions
from tests.tasks.rows import jsonl
from tests.training.runs import Log, have_same_weights, stop_after, train_model, without_times
from tests.training.students import changed, distil, schedule

FAMILIES = {"bert": ("logits",), "gpt2": ("logits",), "bart": ("logits",), "vit": ("logits",)}


@pytest.mark.parametrize("family", quick(FAMILIES, ("bert", "bart")))
def test_only_the_teacher_itself_has_no_loss(family: str) -> None:
    model, batch = zoo.FAMILIES[family](0)
    model.eval()
    distillation = Distillation.of(model, FAMILIES[family])
    assert distillation.loss(model, batch).item() == pytest.approx(0, abs=1e-9)
    student = changed(model).train(False)
    loss = distillation.loss(student, batch)
    loss.backward()
    assert loss.item() > 1e-4
    assert all(weight.grad is None for weight in distillation.teacher.parameters())
    assert any(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in student.parameters())


def bert_batch() -> dict[str, Tensor]:
    return {
        "input_ids": torch.tensor([[3, 5, 7, 0], [4, 6, 8, 9]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
    }


def test_labels_and_padding_have_no_influence() -> None:
    model = folders.bert().eval()
    distillation, student = Distillation.of(model, ("logits",)), changed(model).eval()
    batch = bert_batch()
    loss = distillation.loss(student, batch)
    assert distillation.loss(student, {**batch, "labels": torch.tensor([0, 1])}) == loss
    padded = {**batch, "input_ids": torch.tensor([[3, 5, 7, 2], [4, 6, 8, 9]])}
    assert distillation.loss(student, padded).item() == pytest.approx(loss.item(), rel=1e-5)


def test_padded_targets_of_a_decoder_have_no_influence() -> None:
    model, batch = zoo.FAMILIES["bart"](0)
    distillation, student = Distillation.of(model.eval(), ("logits",)), changed(model).eval()
    decoder_ids = batch["decoder_input_ids"]
    del batch["decoder_attention_mask"]
    labels = torch.full_like(decoder_ids, 5)
    labels[:, -1] = -100
    losses = []
    for padding in (1, 7):
        ids = decoder_ids.clone()
        ids[:, -1] = padding
        losses.append(distillation.loss(student, {**batch, "decoder_input_ids": ids, "labels": labels}).item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("positions", [0, 256], ids=["fused attention", "plain attention"])
@pytest.mark.parametrize("family", quick(FAMILIES, ("bert", "bart")))
def test_gradients_in_bfloat16_are_those_in_float32_up_to_rounding(
    family: str, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_PLAIN_POSITIONS", positions)
    model, batch = zoo.FAMILIES[family](0)
    student, gradients = changed(model.eval()).train(False), []
    for name in ("no", "bf16"):
        Distillation.of(model, FAMILIES[family], precision=name).loss(student, batch).backward()
        gradients.append(
            torch.cat([weight.grad.flatten() for weight in student.parameters() if weight.grad is not None])
        )
        student.zero_grad()
    exact, rounded = gradients
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).norm() < 0.1 * exact.norm()


def test_a_loss_in_bfloat16_is_nearly_the_same_and_divergences_are_in_float32() -> None:
    model = folders.bert().eval()
    student, batch = changed(model).eval(), bert_batch()
    exact, half = (Distillation.of(model, ("logits",), precision=name) for name in ("no", "bf16"))
    loss = half.loss(student, batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.loss(student, batch).item(), rel=0.05)
    assert loss != exact.loss(student, batch)
    outputs = {"logits": student(**batch).logits.detach()}
    assert torch.equal(half.divergences(outputs, batch), exact.divergences(outputs, batch))
    assert half.settings != exact.settings, "a run is not resumed in another precision"


def test_the_temperature_divides_logits_and_scales_the_divergence_back() -> None:
    model = folders.bert().eval()
    student, batch = changed(model).eval(), bert_batch()
    loss = Distillation.of(model, ("logits",), temperature=3.0, hidden_weight=0.0).loss(student, batch)
    with torch.no_grad():
        p, q = ((network(**batch).logits / 3).log_softmax(-1) for network in (model, student))
    assert loss.item() == pytest.approx(9 * (p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-5)


def test_a_regression_has_the_squared_difference_over_the_variance() -> None:
    model = folders.bert(num_labels=1).eval()
    student, batch = changed(model).eval(), bert_batch()
    loss = Distillation.of(model, ("logits",), temperature=3.0, hidden_weight=0.0).loss(student, batch)
    with torch.no_grad():
        dense, logits = model(**batch).logits[:, 0], student(**batch).logits[:, 0]
    expected = (dense - logits).square().mean() / dense.var(correction=0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_weight_of_hidden_states_multiplies_their_relative_error() -> None:
    model = folders.bert().eval()
    student, batch = changed(model).eval(), bert_batch()
    none, single, double = (
        Distillation.of(model, ("logits",), hidden_weight=weight).loss(student, batch).item() for weight in (0, 1, 2)
    )
    assert single > none
    assert double - none == pytest.approx(2 * (single - none), rel=1e-4)


@pytest.fixture
def runs(tmp_path: Path) -> Any:
    """Trains a student of a tiny teacher, with checkpoints in a folder; returns its model and log."""
    inputs = write_inputs(tmp_path)

    def train(name: str, **options: Any) -> tuple[PreTrainedModel, Log]:
        return distil(inputs, tmp_path / name, schedule(20), **options)

    return train


def test_training_brings_a_student_closer_to_its_teacher(runs: Any) -> None:
    _, log = runs("run")
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) == 20
    assert all(map(math.isfinite, losses))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


@pytest.mark.zoo
def test_an_interruption_changes_nothing(runs: Any) -> None:
    whole, log = runs("whole")
    with pytest.raises(EndOfPowerError):
        runs("interrupted", on_progress=stop_after(13))
    resumed, resumed_log = runs("interrupted")
    assert have_same_weights(whole, resumed)
    assert without_times(resumed_log) == without_times(log)


def test_a_divergence_ends_the_run_and_keeps_its_best_and_its_last_checkpoint(runs: Any, tmp_path: Path) -> None:
    students = []

    @contextmanager
    def watched(model: PreTrainedModel) -> Iterator[None]:
        students.append(model)
        yield

    def overwrite_weights(finished: int, total: int) -> None:
        factor = {7: 3.0, 12: math.inf}.get(finished, 1.0)  # worse after the first evaluation, then not finite
        with torch.no_grad():
            for weight in students[0].parameters():
                weight.mul_(factor)

    checkpoint = tmp_path / "run" / "checkpoint-10"
    with fails_with(ErrorCode.NOT_FINITE, DivergedError, step=13, quantity="loss", checkpoint=checkpoint) as caught:
        runs("run", prepare=watched, on_progress=overwrite_weights)
    assert caught.value.exit_code == 9
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    best = tmp_path / "run" / "checkpoint-5"
    assert Path(state["best_model_checkpoint"]) == best
    assert (best / WEIGHTS).is_file()


def overflowing(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose weights are finite, and whose outputs are not."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e25)
    return model


@pytest.mark.parametrize("keeps_outputs", quick([False, True], [True]))
def test_a_teacher_whose_outputs_are_not_finite_is_named(tmp_path: Path, keeps_outputs: bool) -> None:
    inputs = write_inputs(tmp_path)
    folder, teacher = load(inputs / "model"), overflowing(load(inputs / "model").model)
    data = open_data(RowsConfig(data=str(inputs / "rows.tsv"), max_length=8), folder)
    distillation = Distillation.of(teacher, data.task.outputs)
    if keeps_outputs:
        distillation = distillation.keep_outputs(tmp_path / "kept", len(data.train), sum(data.train["length"]))
    with fails_with(ErrorCode.NOT_FINITE, InputError, field="teacher", path=str(inputs / "model")):
        train_model(folder, data, schedule(4), tmp_path / "run", distillation=distillation)
    with fails_with(ErrorCode.NOT_FINITE, InputError, field="teacher"):
        distillation.mean_divergence(folder.model, data.task, data.eval)


@pytest.mark.zoo
def test_questions_of_several_windows_are_learned_alike_from_computed_and_kept_outputs(tmp_path: Path) -> None:
    contexts = [" ".join(questions.WORDS[: 2 + number]) for number in range(10)]
    path = jsonl(tmp_path / "rows.jsonl", *(questions.row(context) for context in contexts))
    torch.manual_seed(0)
    teacher, logs = questions.bert(), []
    for is_kept in (False, True):
        folder = questions.folder_of(questions.wordpieces())
        folder.model.load_state_dict(changed(teacher).state_dict())
        data = open_data(folders.rows_config(path, path, path, max_length=10, stride=2), folder)
        assert {1, 2, 3} <= {len(windows) for windows in data.train["input_ids"]}
        distillation = Distillation.of(teacher, data.task.outputs)
        if is_kept:
            distillation = distillation.keep_outputs(tmp_path / "kept", len(data.train), sum(data.train["length"]))
        log = train_model(folder, data, schedule(6), tmp_path / f"run{is_kept}", distillation=distillation)
        assert distillation.kept is None or distillation.kept.refusal is None
        logs.append([entry.get("loss", entry.get("eval_divergence")) for entry in log if "train_loss" not in entry])
    computed, kept = logs
    assert kept == pytest.approx(computed, rel=5e-3)
    assert len(kept) == 12


def test_the_teacher_reads_each_evaluation_row_once() -> None:
    model, batch = folders.bert().eval(), bert_batch()
    distillation, student = Distillation.of(model, ("logits",)), changed(model).eval()
    rows = {"first": slice(0, 1), "second": slice(1, 2), "both": slice(0, 2)}
    calls = []
    distillation.teacher.register_forward_hook(lambda module, inputs, outputs: calls.append(len(outputs.logits)))
    divergences = {}
    for name, part in rows.items():
        inputs = {key: value[part] for key, value in batch.items()}
        divergences[name] = distillation.divergences(student(**inputs), inputs)
    assert calls == [1, 1]
    expected = torch.cat([divergences["first"], divergences["second"]])
    torch.testing.assert_close(divergences["both"], expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (0.0, -1.0, math.inf, math.nan)),
        *(("hidden_weight", value) for value in (-1.0, math.nan)),
        *(("outputs", value) for value in ((), "logits")),
        ("precision", "fp16"),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: Any) -> None:
    model, _ = zoo.FAMILIES["bert"](0)
    fields = {"outputs": ("logits",), field: value}
    with fails_with(ErrorCode.INVALID_VALUE, field=field):
        Distillation.of(model, **fields)


def test_outputs_and_layers_that_do_not_correspond_are_refused() -> None:
    model, batch = zoo.FAMILIES["bert"](0)
    with fails_with(ErrorCode.UNKNOWN_NAME, field="outputs"):
        Distillation.of(model, ("nothing",)).loss(model, batch)
    student = changed(model)
    layers: Any = student.get_submodule("bert.encoder.layer")
    del layers[-1]
    with fails_with(ErrorCode.INVALID_VALUE, field="hidden_weight"):
        Distillation.of(model, ("logits",)).loss(student, batch)
    assert Distillation.of(model, ("logits",), hidden_weight=0).loss(student, batch) > 0
