"""Saved baselines: arrays are restored, and times of another machine are not compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.environment import machine
from compressor.errors import ErrorCode, InputError
from compressor.latency.baseline import Baseline, check_comparable, digest
from compressor.targets.relative_error import relative_error

BATCHES = [{"x": np.full((2, 4), number, np.float32)} for number in range(3)]
HOST = "onnxruntime on CPUExecutionProvider"


def baseline(**fields: Any) -> Baseline:
    """A baseline that is comparable on this machine."""
    defaults: dict[str, Any] = {
        "model": "dense",
        "host": HOST,
        "inputs": digest(BATCHES),
        "batch": 2,
        "seq": 4,
        "times": ((1.0, 1.1), (0.9, 1.0)),
        "outputs": tuple({"y": batch["x"] * 2} for batch in BATCHES),
        "machine": machine(),
    }
    return Baseline(**{**defaults, **fields})


@pytest.mark.parametrize(
    "array",
    [
        np.array([[1.5, -2.0], [0.1, 3e-38]], np.float32),
        np.array([[1, -(2**62)]], np.int64),
        np.array([True, False]),
        np.array([0.1, 65504.0], np.float16),
        np.zeros((1, 3), np.uint8),
    ],
)
def test_an_array_is_restored_bit_for_bit(array: np.ndarray, tmp_path: Path) -> None:
    baseline(outputs=({"y": array},)).save(tmp_path / "b.json")
    (outputs,) = Baseline.load(tmp_path / "b.json").outputs
    assert outputs["y"].dtype == array.dtype
    np.testing.assert_array_equal(outputs["y"], array)


def test_texts_are_kept_as_bytes(tmp_path: Path) -> None:
    texts = np.array([["yes", "caf\u00e9", b"\xff"]], np.object_)  # a runtime gives str, a server bytes
    baseline(outputs=({"y": texts},)).save(tmp_path / "texts.json")
    (outputs,) = Baseline.load(tmp_path / "texts.json").outputs
    assert outputs["y"].tolist() == [[b"yes", "caf\u00e9".encode(), b"\xff"]]
    assert relative_error(texts, outputs["y"], {}) == 0.0
    assert relative_error(texts[:, ::-1], outputs["y"], {}) == float("inf")


FIRST = {"y": {"dtype": "float32", "values": [[1.0, 2.0]]}}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"outputs": [[1.0]]}, ErrorCode.FILE_UNREADABLE),
        ({"outputs": [{"y": {**FIRST["y"], "dtype": "float99"}}]}, ErrorCode.FILE_UNREADABLE),
        ({"outputs": [{"y": {**FIRST["y"], "dtype": "datetime64[s]"}}]}, ErrorCode.FILE_UNREADABLE),
        ({"outputs": [{"y": {**FIRST["y"], "values": [[1.0], []]}}]}, ErrorCode.FILE_UNREADABLE),
        ({"outputs": [{"y": {"dtype": "object", "values": [1]}}]}, ErrorCode.FILE_UNREADABLE),
        ({"times": []}, ErrorCode.FILE_UNREADABLE),
        ({"times": [[]]}, ErrorCode.FILE_UNREADABLE),
        ({"times": [[1.0], [1.0, 2.0]]}, ErrorCode.FILE_UNREADABLE),
        ({"temperature": 70}, ErrorCode.FILE_UNREADABLE),
        ({"format": "compressor latency baseline 2"}, ErrorCode.FILE_MISMATCH),
    ],
)
def test_another_file_is_refused(fields: dict[str, Any], code: ErrorCode, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text(json.dumps({**json.loads(baseline().model_dump_json()), **fields}))
    with pytest.raises(InputError) as error:
        Baseline.load(path)
    assert (error.value.code, error.value.details["path"]) == (code, path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        Baseline.load(tmp_path / "b.json")
    assert error.value.code is ErrorCode.FILE_MISSING


@pytest.mark.parametrize(
    ("fields", "differences"),
    [
        ({"machine": {**machine(), "processor": "another"}}, ("processor",)),
        ({"machine": {}}, ("processor", "cores", "memory")),
        ({"host": HOST.replace("CPU", "CUDA")}, ("host",)),
    ],
)
def test_times_of_another_machine_are_compared_only_with_force(
    fields: dict[str, Any], differences: tuple[str, ...]
) -> None:
    saved = baseline(**fields)
    with pytest.raises(InputError) as error:
        check_comparable(saved, Path("b.json"), BATCHES, HOST, force=False)
    assert (error.value.code, error.value.details["differences"]) == (ErrorCode.FILE_MISMATCH, differences)
    check_comparable(saved, Path("b.json"), BATCHES, HOST, force=True)


def test_times_of_other_inputs_are_not_compared() -> None:
    different = (
        BATCHES[::-1],
        BATCHES[:2],
        [{"z": batch["x"]} for batch in BATCHES],
        [{"x": batch["x"].astype(np.float64)} for batch in BATCHES],
    )
    for batches in different:
        with pytest.raises(InputError) as error:
            check_comparable(baseline(), Path("b.json"), batches, HOST, force=True)
        assert (error.value.code, error.value.details["differences"]) == (ErrorCode.FILE_MISMATCH, ("inputs",))


def test_every_batch_has_outputs() -> None:
    saved = baseline(outputs=tuple({"y": batch["x"]} for batch in BATCHES[:2]))
    with pytest.raises(InputError) as error:
        check_comparable(saved, Path("b.json"), BATCHES, HOST, force=False)
    assert (error.value.details["count"], error.value.details["expected"]) == (2, 3)
