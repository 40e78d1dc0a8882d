"""Weight files are checked before they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.errors import ErrorCode
from compressor.model_folder import load
from tests.faults import fails_with
from tests.model_folder.edits import Edit, delete, pickle_weights, remove_shard, set_first_value, truncate

WEIGHTS = "model.safetensors"
FAULTS: dict[str, tuple[Edit, ErrorCode, str]] = {
    "no weights": (delete(WEIGHTS), ErrorCode.FILE_MISSING, WEIGHTS),
    "pickled weights": (pickle_weights, ErrorCode.UNSAFE_CODE, "pytorch_model.bin"),
    "truncated": (truncate(WEIGHTS, 0.9), ErrorCode.FILE_UNREADABLE, WEIGHTS),
    "truncated in the header": (truncate(WEIGHTS, 0.01), ErrorCode.FILE_UNREADABLE, WEIGHTS),
    "empty": (truncate(WEIGHTS, 0), ErrorCode.FILE_UNREADABLE, WEIGHTS),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_the_file(folder: Path, fault: str) -> None:
    edit, code, name = FAULTS[fault]
    edit(folder)
    with fails_with(code, path=folder / name):
        load(folder)


@pytest.mark.parametrize(
    ("content", "is_pointer"), [("version https://git-lfs.github.com/spec/v1\n", True), ("v", False)]
)
def test_a_pointer_in_place_of_weights_is_named(folder: Path, content: str, is_pointer: bool) -> None:
    (folder / WEIGHTS).write_text(content)
    with fails_with(ErrorCode.FILE_UNREADABLE, path=folder / WEIGHTS, is_pointer=is_pointer):
        load(folder)


def test_a_missing_shard_is_refused(folder: Path) -> None:
    remove_shard(folder)
    with fails_with(ErrorCode.FILE_MISSING) as caught:
        load(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    missing = caught.value.details["path"]
    assert missing.name in index["weight_map"].values()
    assert not missing.exists()


def test_a_shard_outside_the_folder_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / WEIGHTS)
    index = {"weight_map": {"classifier.bias": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with fails_with(ErrorCode.FILE_UNREADABLE, value="../model.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("tensor", "value"), [("classifier.weight", float("nan")), ("classifier.weight", float("-inf"))]
)
def test_values_that_are_not_finite_are_refused(folder: Path, tensor: str, value: float) -> None:
    set_first_value(tensor, value)(folder)
    with fails_with(ErrorCode.NOT_FINITE, path=folder, tensor=tensor, count=1):
        load(folder)


def test_pickled_weights_load_with_permission(folder: Path) -> None:
    expected = load(folder).fingerprint
    pickle_weights(folder)
    with fails_with(ErrorCode.UNSAFE_CODE, field="allow_pickle"):
        load(folder)
    assert load(folder, allow_pickle=True).fingerprint == expected
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    with fails_with(ErrorCode.FILE_MISMATCH, path=folder):
        load(folder, allow_pickle=True)


def test_a_pickle_never_runs_code(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (folder / "ran",)

    (folder / WEIGHTS).unlink()
    torch.save({"classifier.bias": Bomb()}, folder / "pytorch_model.bin")
    with fails_with(ErrorCode.FILE_MISMATCH):
        load(folder, allow_pickle=True)
    assert not (folder / "ran").exists()
