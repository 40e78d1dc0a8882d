"""Training in several processes: each reads streams of its own, and together they train as one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from compressor.training.checkpoints import newest
from compressor.training.fit import fit
from tests import language
from tests.launch import finish, launch, start


def test_two_processes_read_streams_of_their_own(tmp_path: Path) -> None:
    held = language.folder(**language.UNDROPPED)
    log = fit(
        held.model,
        language.data(tmp_path, held),
        language.schedule(batch_size=4),
        {},
        tmp_path / "alone",
        lambda done, total: None,
    )
    ranks = launch("tests.language", tmp_path)
    assert ranks[0] == ranks[1]
    assert ranks[0]["perplexity"] == pytest.approx(
        [entry["eval_perplexity"] for entry in log if "eval_perplexity" in entry], rel=1e-3
    )
    norm = sum(float(weight.detach().double().norm()) for weight in held.model.parameters())
    assert ranks[0]["norm"] == pytest.approx(norm, rel=1e-4)
    # Gates learned with the model, interrupted between checkpoints: what each process remembered is met again.
    assert ranks[0]["memories"] == ["memory_0.safetensors", "memory_1.safetensors"]
    assert ranks[0]["resumed"] == ranks[0]["whole"]
    assert sum(map(len, ranks[0]["whole"]["kept"])) == 3


@pytest.mark.zoo
def test_a_command_of_two_processes_goes_on_bit_for_bit_where_it_was_stopped(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(language.text(60))
    sizes = "--layers 2 --hidden 16 --heads 4 --persistent 8 --memory 8 --segment 6 --batch-size 2"

    def train(name: str) -> list[str]:
        paths = [str(tmp_path / name), "--data", str(tmp_path / "train.txt")]
        return ["compressor.cli", "train", *paths, *sizes.split(), "--steps", "150", "--evaluations", "50"]

    finish(start(*train("whole")))
    running = start(*train("halved"))
    checkpoints = tmp_path / "halved.partial" / "learning" / "checkpoints"
    while not any(checkpoints.glob("checkpoint-9*")) and running.poll() is None:
        time.sleep(0.01)
    running.terminate()
    running.communicate()
    assert newest(checkpoints, 2) is not None
    assert not (tmp_path / "halved").exists()
    finish(start(*train("halved")))
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    assert (whole / "model.safetensors").read_bytes() == (halved / "model.safetensors").read_bytes()
    found = [json.loads((folder / "training.json").read_text())["found"] for folder in (whole, halved)]
    assert found[0] == found[1]
