"""An interrupted run finds its own checkpoints if they are complete."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compressor.errors import ErrorCode, UsageError
from compressor.training.checkpoints import claim, digest, memory_file, newest_checkpoint
from tests.faults import fails_with

SETTINGS = {"layers": 2, "seed": 0, "rows": ["sha256:a"], "schedule": {"steps": 3}}


def write_checkpoint(folder: Path, step: int, processes: int = 0) -> Path:
    """A complete checkpoint, with the memories of each process."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    for process in range(processes):
        save_file({"0": torch.zeros(3)}, memory_file(checkpoint, process))
    return checkpoint


def test_a_checkpoint_is_complete_with_the_memory_of_every_process(tmp_path: Path) -> None:
    before, last = (write_checkpoint(tmp_path, step, processes=2) for step in (9, 10))
    assert newest_checkpoint(tmp_path, 2) == last
    second = memory_file(last, 1)
    second.write_bytes(second.read_bytes()[:-4])
    assert newest_checkpoint(tmp_path, 1) == last
    assert newest_checkpoint(tmp_path, 2) == before
    assert not last.exists()
    memory_file(before, 1).unlink()
    assert newest_checkpoint(tmp_path, 2) is None


@pytest.mark.parametrize("state", [None, "", '{"global_step": 9, '])
def test_a_checkpoint_without_the_trainers_state_is_incomplete(state: str | None, tmp_path: Path) -> None:
    first, second = (write_checkpoint(tmp_path, step) for step in (3, 6))
    (second / "trainer_state.json").unlink()
    if state is not None:
        (second / "trainer_state.json").write_text(state)
    assert newest_checkpoint(tmp_path) == first
    assert not second.exists()


def test_the_same_run_resumes(tmp_path: Path) -> None:
    assert claim(tmp_path / "run", SETTINGS) is None
    checkpoint = write_checkpoint(tmp_path / "run", 3)
    assert claim(tmp_path / "run", dict(reversed(SETTINGS.items())), refuse_others=True) == checkpoint


def test_checkpoints_of_another_run_are_deleted(tmp_path: Path) -> None:
    claim(tmp_path / "run", SETTINGS)
    checkpoint = write_checkpoint(tmp_path / "run", 3)
    assert claim(tmp_path / "run", {**SETTINGS, "seed": 1}) is None
    assert not checkpoint.exists()


def test_checkpoints_of_another_run_are_refused(tmp_path: Path) -> None:
    claim(tmp_path, SETTINGS)
    checkpoint = write_checkpoint(tmp_path, 3)
    for changes in ({"seed": 1, "layers": 3}, {"rows": ["sha256:b"]}, {"gate": None, "schedule": {"steps": 4}}):
        with fails_with(ErrorCode.RUN_DIFFERS, UsageError, path=tmp_path) as caught:
            claim(tmp_path, {**SETTINGS, **changes}, refuse_others=True)
        # A setting that is absent equals None.
        assert set(caught.value.details["fields"]) == changes.keys() - {"gate"}
    assert checkpoint.exists()


def test_the_message_names_what_differs(tmp_path: Path) -> None:
    claim(tmp_path, SETTINGS)
    write_checkpoint(tmp_path, 3)
    with pytest.raises(UsageError) as error:
        claim(tmp_path, {**SETTINGS, "seed": 1, "layers": 3, "rows": []}, refuse_others=True)
    assert error.value.code is ErrorCode.RUN_DIFFERS
    assert {"seed", "layers", "rows"} == {*error.value.details["fields"]}
    assert "seed" in str(error.value)
    assert "rows" not in str(error.value), "values are named, lists are too long"
    with fails_with(ErrorCode.RUN_DIFFERS, UsageError, fields=("rows",)):
        claim(tmp_path, {**SETTINGS, "rows": []}, refuse_others=True)


def test_a_digest_depends_on_names_and_values() -> None:
    first, second = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    assert digest(first) == digest(first) != digest(second)
    second.load_state_dict(first.state_dict())
    assert digest(first) == digest(second)
    assert digest(torch.nn.Sequential(first)) != digest(first)
