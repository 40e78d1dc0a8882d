"""Example inputs from a file: any batch and length, and one line for every bad file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from compressor.errors import ErrorCode
from compressor.model_folder import example_inputs, load
from compressor.units import find_sites
from tests.faults import fails_with

IDS = np.arange(10, dtype=np.int32).reshape(2, 5) + 5
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def test_inputs_of_any_size_are_taken_from_the_file(saved: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", input_ids=IDS, attention_mask=MASK)
    folder = load(saved, example_inputs=tmp_path / "inputs.npz")
    inputs = example_inputs(folder, 3, 7)
    assert inputs["input_ids"].dtype == torch.int64
    whole, padded = [*IDS[0], *IDS[0, :2]], [*IDS[1, :3], IDS[1, 0], 0, 0, 0]
    assert inputs["input_ids"].tolist() == [whole, padded, whole]
    assert inputs["attention_mask"][1].tolist() == [1, 1, 1, 1, 0, 0, 0]
    assert example_inputs(folder, 1, 3, seed=1)["attention_mask"].tolist() == [[1, 1, 0]]
    assert example_inputs(folder, 2, 5)["input_ids"].tolist() == IDS.tolist()
    assert find_sites(folder.model, inputs)


def test_axes_that_are_not_positions_keep_their_sizes(saved: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", inputs_embeds=np.ones((2, 5, 16)), position_ids=np.arange(5)[None].repeat(2, 0))
    inputs = example_inputs(load(saved, example_inputs=tmp_path / "inputs.npz"), 4, 9)
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {
        "inputs_embeds": (4, 5, 16),
        "position_ids": (4, 5),
    }
    assert inputs["inputs_embeds"].dtype == torch.float32


BAD: dict[str, tuple[Callable[[Path], object], ErrorCode]] = {
    "missing": (lambda path: None, ErrorCode.FILE_MISSING),
    "no archive": (lambda path: path.write_text("text"), ErrorCode.FILE_UNREADABLE),
    "pickled": (lambda path: np.savez(path, input_ids=np.array([{}], object)), ErrorCode.FILE_UNREADABLE),
    "empty": (lambda path: np.savez(path), ErrorCode.TENSOR_MISMATCH),
    "no such input": (lambda path: np.savez(path, input_id=IDS), ErrorCode.TENSOR_MISMATCH),
    "texts": (lambda path: np.savez(path, input_ids=np.array(["a", "b"])), ErrorCode.TENSOR_MISMATCH),
    "a scalar": (lambda path: np.savez(path, input_ids=np.array(3)), ErrorCode.TENSOR_MISMATCH),
    "other rows": (lambda path: np.savez(path, input_ids=IDS, attention_mask=MASK[:1]), ErrorCode.TENSOR_MISMATCH),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line(name: str, saved: Path, tmp_path: Path) -> None:
    write, code = BAD[name]
    path = tmp_path / "inputs.npz"
    write(path)
    with fails_with(code, path=path):
        load(saved, example_inputs=path)


def test_inputs_that_the_model_does_not_run_on_are_one_line(saved: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", attention_mask=MASK)
    folder = load(saved, example_inputs=tmp_path / "inputs.npz")
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, family="bert"):
        find_sites(folder.model, example_inputs(folder, 2, 5))
