"""`train` writes a complete model folder, resumes bit for bit, and refuses files of another training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.errors import DivergedError, ErrorCode, InputError, UsageError
from compressor.model_folder import load
from compressor.models.forwards import reader
from compressor.results import NoteCode
from compressor.tasks import open_data
from compressor.tasks.causal_lm import read
from compressor.training.train import FILE_NAME, TrainingResult, schedule_of, train
from tests import language
from tests.faults import fails_with
from tests.folders import rows_config
from tests.language import EndOfPowerError, training_request
from tests.training.runs import Recorder, without_times


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Write the training text to the path that `training_request` expects."""
    path = tmp_path / "train.txt"
    path.write_text(language.text(30))
    return path


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingResult]:
    """A finished training of the same text."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "train.txt").write_text(language.text(30))
    return folder / "out", train(training_request(folder / "out", mixed_precision="no"))


def assert_same_training(out: Path, expected: Path) -> None:
    """Two folders hold the same model, tokenizer and curves."""
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (expected / name).read_bytes(), name
    logs = [json.loads((folder / FILE_NAME).read_text())["log"] for folder in (out, expected)]
    assert without_times(logs[0]) == without_times(logs[1])


@pytest.mark.parametrize("stop", [*(pytest.param(stop, marks=pytest.mark.zoo) for stop in (2, 12)), 7])
@pytest.mark.usefixtures("text")
def test_an_interrupted_training_equals_the_uninterrupted_one_bit_for_bit(
    stop: int, uninterrupted: tuple[Path, TrainingResult], tmp_path: Path
) -> None:
    training = training_request(tmp_path / "run", mixed_precision="no")
    with pytest.raises(EndOfPowerError):
        train(training, Recorder(stop))
    checkpoints = tmp_path / "run.partial" / "learning" / "checkpoints"
    if stop > 3:
        files = {file.name for file in next(iter(checkpoints.glob("checkpoint-*"))).iterdir()}
        assert {"model.safetensors", "optimizer.pt", "memory_0.safetensors"} <= files
    torch.rand(stop)  # other draws do not matter
    expected, result = uninterrupted
    assert train(training) == result
    assert not (tmp_path / "run.partial").exists()
    assert_same_training(tmp_path / "run", expected)


@pytest.mark.zoo
@pytest.mark.usefixtures("text")
def test_training_in_bfloat16_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, resumed = (training_request(tmp_path / name, mixed_precision="bf16") for name in ("whole", "resumed"))
    result = train(whole)
    with pytest.raises(EndOfPowerError):
        train(resumed, Recorder(7))
    assert train(resumed) == result
    assert_same_training(resumed.out, whole.out)


@pytest.mark.parametrize(
    ("level", "architecture", "metric"),
    [
        pytest.param("word", "transformer-xl", "perplexity", marks=pytest.mark.zoo),
        ("character", "all-attention", "bits-per-character"),
    ],
)
@pytest.mark.usefixtures("text")
def test_a_complete_model_folder_is_written(level: Any, architecture: Any, metric: str, tmp_path: Path) -> None:
    eval_text = tmp_path / "eval.txt"
    eval_text.write_text(language.text(10, seed=1))
    fields = {"level": level, "architecture": architecture, "eval_data": str(eval_text)}
    listener = Recorder()
    result = train(training_request(tmp_path / "out", **fields), listener)
    folder = load(tmp_path / "out")
    assert (folder.task, folder.family, result.metric) == ("causal-lm", architecture, metric)
    assert folder.config.memory_length == 8
    assert len(folder.processor) == folder.config.vocab_size == result.vocabulary
    data = open_data(rows_config(test_data=str(eval_text), max_length=6), folder)
    score = data.task.score(read(data.task, data.test, reader(folder.model), streams=3))
    assert score == pytest.approx(result.test, rel=1e-5)
    assert [note.code for note in listener.notes] == [NoteCode.TEST_IS_EVAL, *[NoteCode.EVALUATED] * 4]
    assert [note.text.split(":")[0] for note in listener.notes[1:]] == [f"step {step} of 12" for step in (3, 6, 9, 12)]
    assert f"{metric} {result.eval:.4g}" in {note.text.split(": ")[1] for note in listener.notes[1:]}


@pytest.mark.usefixtures("text")
def test_the_file_of_a_training_holds_its_configuration_result_and_log(
    uninterrupted: tuple[Path, TrainingResult],
) -> None:
    folder, result = uninterrupted
    record = json.loads((folder / FILE_NAME).read_text())
    assert record["training"]["layers"] == 2
    assert TrainingResult(**record["result"]) == result
    assert [entry["step"] for entry in record["log"] if "eval_perplexity" in entry] == [3, 6, 9, 12]


@pytest.mark.zoo
@pytest.mark.parametrize(("optimizer", "rate"), [("lamb", 0.1), ("adamw", 0.02)])
def test_training_learns_to_count(optimizer: Any, rate: float, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(language.text(200))
    pace = {"steps": 60, "batch_size": 8, "evaluations": 1, "learning_rate": rate, "optimizer": optimizer}
    result = train(training_request(tmp_path / "out", hidden=32, **pace, **language.UNDROPPED))
    assert result.test < 0.6 * result.vocabulary


def test_checkpoints_of_another_training_are_refused(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(EndOfPowerError):
        train(training_request(out), Recorder(7))
    with fails_with(ErrorCode.RUN_DIFFERS, UsageError) as caught:
        train(training_request(out, layers=3, seed=1))
    assert {"layers", "seed"} <= set(caught.value.details["fields"])
    text.write_text(language.text(31))
    with fails_with(ErrorCode.RUN_DIFFERS, UsageError) as caught:
        train(training_request(out))
    assert "rows" in caught.value.details["fields"]
    assert list((tmp_path / "out.partial").rglob("model.safetensors"))
    train(training_request(out, layers=1, force=True))
    assert load(out).config.num_hidden_layers == 1
    with fails_with(ErrorCode.OUTPUT_EXISTS, UsageError):
        train(training_request(out))


@pytest.mark.zoo
@pytest.mark.usefixtures("text")
def test_a_training_that_diverges_at_once_does_not_block_the_next(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with fails_with(ErrorCode.NOT_FINITE, DivergedError, step=1, checkpoint=None) as caught:
        train(training_request(out, learning_rate=1e30, warmup=0.0, evaluations=12))
    assert all(flag in str(caught.value) for flag in ("--learning-rate", "--warmup", "--force"))
    assert train(training_request(out)).eval < math.inf


@pytest.mark.zoo
@pytest.mark.usefixtures("text")
def test_after_a_late_divergence_the_remedy_of_the_message_works(tmp_path: Path) -> None:
    out = tmp_path / "out"
    diverging = training_request(out, learning_rate=1e4, warmup=1.0, optimizer="adamw", evaluations=12)
    with fails_with(ErrorCode.NOT_FINITE, DivergedError) as caught:
        train(diverging)
    assert caught.value.details["checkpoint"].is_dir()
    for state in (tmp_path / "out.partial").rglob("trainer_state.json"):
        log = json.loads(state.read_text())["log_history"]
        assert all(math.isfinite(entry.get("eval_perplexity", 0.0)) for entry in log)
    with fails_with(ErrorCode.RUN_DIFFERS, UsageError):
        train(training_request(out))
    train(training_request(out, force=True))


@pytest.mark.usefixtures("text")
def test_too_little_text_for_the_streams_is_refused(tmp_path: Path) -> None:
    with fails_with(ErrorCode.TOO_FEW_ROWS, InputError):
        train(training_request(tmp_path / "out", batch_size=90))
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("has_cuda", "native", "configured", "precision"),
    [
        (True, True, "auto", "bf16"),
        (True, False, "auto", "no"),  # V100 and T4 emulate bfloat16, more slowly than they compute in float32
        (False, False, "auto", "no"),
        (True, False, "bf16", "bf16"),
        (True, True, "no", "no"),
    ],
)
def test_bfloat16_is_used_if_the_device_computes_it_natively(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, native: bool, configured: str, precision: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    assert schedule_of(training_request(mixed_precision=configured)).mixed_precision == precision
