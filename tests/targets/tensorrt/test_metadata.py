"""Metadata of engines: read, and compared with the machine, before TensorRT sees the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compressor.errors import ErrorCode, InputError
from compressor.targets import target
from compressor.targets.cuda import Device
from compressor.targets.tensorrt.metadata import (
    EngineMetadata,
    TimingsState,
    TimingsUse,
    metadata_path,
    read_metadata,
    runs_engines_of,
)
from tests.targets.tensorrt.machines import H200, write_engine

A10, H100, T4 = Device("NVIDIA A10", (8, 6), 1), Device("NVIDIA H100", (9, 0), 1), Device("Tesla T4", (7, 5), 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.plan"


def test_metadata_are_read_back(path: Path) -> None:
    timings = TimingsUse(state=TimingsState.DAMAGED, path=path)
    assert write_engine(path, timings=timings) == read_metadata(path)


def test_metadata_of_version_0_1_are_read(path: Path) -> None:
    """Hashes have the keys `plan` and `model`, and there are no timings."""
    metadata = write_engine(path)
    stored = json.loads(metadata_path(path).read_text())
    assert {"plan", "model"} <= stored.keys()
    assert not {"engine_hash", "graph_hash"} & stored.keys()
    del stored["timings"]
    assert EngineMetadata.model_validate_json(json.dumps(stored)) == metadata


@pytest.mark.parametrize(
    ("changes", "device", "version", "field"),
    [
        ({}, H200, "10.16.1", None),
        ({}, A10, "10.16.1", "gpu"),
        ({}, H100, "10.16.1", "gpu"),
        ({"hardware_compatible": True}, A10, "10.16.1", None),
        ({"hardware_compatible": True}, T4, "10.16.1", "gpu"),
        ({}, H200, "10.17.0", "tensorrt"),
        ({"version_compatible": True}, H200, "10.17.0", None),
        ({"version_compatible": True}, H200, "10.9.0", "tensorrt"),
        ({"version_compatible": True}, H200, "11.0.0", None),
        ({"version_compatible": True}, H200, "12.0.0", "tensorrt"),
        ({"version_compatible": True, "tensorrt": "8.6.1"}, H200, "10.3.0", None),
        ({"version_compatible": True, "tensorrt": "8.6.1"}, H200, "11.0.0", "tensorrt"),
    ],
)
def test_an_engine_of_another_machine_is_refused(
    changes: dict[str, Any], device: Device, version: str, field: str | None, path: Path
) -> None:
    metadata = write_engine(path, **changes)
    if field is None:
        metadata.check_machine(path, device, version)
        return
    with pytest.raises(InputError) as error:
        metadata.check_machine(path, device, version)
    assert (error.value.code, error.value.details["field"]) == (ErrorCode.FILE_MISMATCH, field)
    assert error.value.details["value"] == (device.name if field == "gpu" else version)
    assert "compress build OUT --target trt" in str(error.value)


@pytest.mark.parametrize(
    ("later", "earlier", "runs"),
    [("10.3", "8.6.1", True), ("11.0", "8.6.1", False), ("10.10", "10.9", True), ("10.9", "10.10", False)],
)
def test_versions_are_compared_as_numbers(later: str, earlier: str, runs: bool) -> None:
    assert runs_engines_of(later, earlier) is runs


def test_a_damaged_engine_never_reaches_tensorrt(path: Path) -> None:
    def load() -> tuple[ErrorCode, Path, str | None]:
        with pytest.raises(InputError) as error:
            target("trt").load(path)
        return error.value.code, error.value.details["path"], error.value.details.get("field")

    assert load() == (ErrorCode.FILE_MISSING, path, None)
    path.write_bytes(b"an engine")
    assert load() == (ErrorCode.FILE_MISSING, metadata_path(path), None)
    write_engine(path)
    path.write_bytes(b"an engin")
    assert load() == (ErrorCode.FILE_UNREADABLE, path, None)
    metadata_path(path).write_text("{}")
    assert load() == (ErrorCode.FILE_UNREADABLE, metadata_path(path), "tensorrt")


@pytest.mark.parametrize(
    ("shapes", "refused"),
    [
        ({"ids": (32, 384), "other": (9,)}, False),
        ({"ids": (33, 384)}, True),
        ({"ids": (1, 0)}, True),
        ({"ids": (1,)}, True),
        ({}, True),
    ],
)
def test_shapes_outside_of_the_profile_are_refused(
    shapes: dict[str, tuple[int, ...]], refused: bool, path: Path
) -> None:
    metadata = write_engine(path)
    if not refused:
        metadata.check_shapes(shapes)
        return
    with pytest.raises(InputError) as error:
        metadata.check_shapes(shapes)
    assert (error.value.code, error.value.details["tensor"]) == (ErrorCode.TENSOR_MISMATCH, "ids")
    if shapes:
        bounds = {"minimum": (1, 1), "maximum": (32, 384)}
        assert error.value.details == {"tensor": "ids", "shape": shapes["ids"], **bounds}


def test_messages(path: Path) -> None:
    """The messages about an engine that does not fit."""
    metadata = write_engine(path)
    with pytest.raises(InputError) as error:
        metadata.check_machine(path, A10, "10.16.1")
    assert str(error.value) == (
        f"{path}: built for another GPU, NVIDIA H200 (SM 9.0), and this is NVIDIA A10 (SM 8.6); build it on this"
        " machine: compress build OUT --target trt"
    )
    with pytest.raises(InputError) as error:
        metadata.check_shapes({"ids": (33, 384)})
    assert str(error.value) == (
        "ids: its shape is [33, 384], and the engine takes [1, 1] to [32, 384]; build it for these sizes too (--batch,"
        " --seq)"
    )
