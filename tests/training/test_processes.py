"""Training in several processes: each reads its own streams, and all train one model."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from compressor.training.checkpoints import newest
from compressor.training.train import FILE_NAME
from tests import language
from tests.launch import finish, launch, start
from tests.training.runs import train_model


def test_two_processes_read_their_own_streams(tmp_path: Path) -> None:
    folder = language.folder(**language.UNDROPPED)
    log = train_model(folder, language.data(tmp_path, folder), language.schedule(batch_size=4), tmp_path / "alone")
    ranks = launch("tests.training.process", tmp_path)
    assert ranks[0] == ranks[1]
    perplexities = [entry["eval_perplexity"] for entry in log if "eval_perplexity" in entry]
    assert ranks[0]["perplexity"] == pytest.approx(perplexities, rel=1e-3)
    norm = sum(float(weight.detach().double().norm()) for weight in folder.model.parameters())
    assert ranks[0]["norm"] == pytest.approx(norm, rel=1e-4)
    # Gates trained with the model, interrupted between checkpoints: each process restores its own memories.
    assert ranks[0]["memories"] == ["memory_0.safetensors", "memory_1.safetensors"]
    assert ranks[0]["resumed"] == ranks[0]["whole"]
    assert sum(ranks[0]["whole"]["kept"]) == 3


@pytest.mark.zoo
def test_an_interrupted_command_of_two_processes_resumes_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(language.text(60))
    sizes = "--layers 2 --hidden 16 --heads 4 --persistent 8 --memory 8 --segment 6 --batch-size 2"

    def train(name: str) -> list[str]:
        paths = [str(tmp_path / name), "--data", str(tmp_path / "train.txt")]
        return ["compressor.cli", "train", *paths, *sizes.split(), "--steps", "150", "--evaluations", "50"]

    finish(start(*train("whole")))
    process = start(*train("halved"))
    checkpoints = tmp_path / "halved.partial" / "learning" / "checkpoints"
    while not any(checkpoints.glob("checkpoint-9*")) and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    process.communicate()
    assert newest(checkpoints, 2) is not None
    assert not (tmp_path / "halved").exists()
    finish(start(*train("halved")))
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    assert (whole / "model.safetensors").read_bytes() == (halved / "model.safetensors").read_bytes()
    results = [json.loads((folder / FILE_NAME).read_text())["result"] for folder in (whole, halved)]
    assert results[0] == results[1]
