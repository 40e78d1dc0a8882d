"""The registry of targets, and the properties of every target."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from compressor.errors import ErrorCode, InputError, TargetMissingError, UsageError
from compressor.targets import (
    DEFAULT_TARGET,
    TARGETS,
    BuildOptions,
    Precision,
    Provider,
    span,
    target,
    target_of,
    unused_options,
)
from tests.faults import fails_with

WITHOUT_TORCH = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "tensorrt"}:
            raise ImportError(f"{name} is absent")

sys.meta_path.insert(0, Absent())
for package in ("compressor.targets", "compressor.measure"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        importlib.import_module(module.name)
for name in ("compressor.latency", "compressor.engines.prove"):
    importlib.import_module(name)
"""


@pytest.mark.parametrize("name", TARGETS)
class TestEveryTarget:
    def test_its_object_describes_the_target(self, name: str) -> None:
        described = target(name)
        assert described.name == name
        assert described.title
        assert described.providers
        assert described.options <= {field.name for field in fields(BuildOptions)}
        assert described.needs_device is ("cpu" not in described.providers)
        assert described.metadata_file != described.engine_file

    def test_its_engine_file_is_found_by_its_suffix(self, name: str) -> None:
        described = target(name)
        assert described.engine_file.endswith(described.suffixes)
        assert all(target_of(Path(f"any{suffix}")) is described for suffix in described.suffixes)

    @pytest.mark.parametrize("provider", [None, "cpu", "cuda"])
    def test_it_refuses_the_providers_that_it_lacks_on_any_machine(self, name: str, provider: Provider | None) -> None:
        described = target(name)
        if provider is None or provider in described.providers:
            described.check_request(provider=provider)
            return
        for check in (described.check_request, described.check):
            with pytest.raises(UsageError) as error:
                check(provider=provider)
            assert error.value.code is ErrorCode.CONTRADICTION
            assert (error.value.details["value"], "target" in error.value.details["fields"]) == (provider, True)

    def test_it_refuses_unknown_precisions_and_providers(self, name: str, tmp_path: Path) -> None:
        unknown: Any
        for unknown in ("float16", "FP16", "int4"):
            with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="precision"):
                target(name).check(precision=unknown)
        unknown = "tpu"
        with fails_with(ErrorCode.CONTRADICTION, UsageError, value=unknown):
            target(name).check(provider=unknown)

    def test_it_refuses_a_kernel_that_it_cannot_use(self, name: str, tmp_path: Path) -> None:
        described, kernel = target(name), tmp_path / "kernel.so"
        if "kernel" in described.options:
            described.check_request(kernel=kernel)
            return
        with pytest.raises(UsageError) as error:
            described.check_request(kernel=kernel)
        assert (error.value.code, error.value.details["value"]) == (ErrorCode.CONTRADICTION, kernel)

    def test_options_are_used_or_unused(self, name: str) -> None:
        assert not target(name).options & unused_options(name)
        assert target(name).options | unused_options(name) == {
            option for described in map(target, TARGETS) for option in described.options
        }

    def test_it_names_an_engine_that_is_missing(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / target(name).engine_file
        with pytest.raises(InputError) as error:
            target(name).load(path)
        assert (error.value.code, error.value.details["path"]) == (ErrorCode.FILE_MISSING, path)


def test_targets_are_found_by_name() -> None:
    assert {"ort", "trt"} <= set(TARGETS)
    with pytest.raises(UsageError) as error:
        target("tflite")
    assert (error.value.code, error.value.details["value"]) == (ErrorCode.UNKNOWN_NAME, "tflite")


def test_other_files_belong_to_the_default_target() -> None:
    assert target_of(Path("model.tflite")) is target(DEFAULT_TARGET)
    assert "cpu" in target(DEFAULT_TARGET).providers


@pytest.mark.parametrize(
    ("name", "precision", "code"),
    [
        ("trt", "fp32", ErrorCode.DEVICE_MISSING),
        ("ort", "fp16", ErrorCode.DEVICE_MISSING),
        ("ort", "bf16", ErrorCode.UNSUPPORTED),
    ],
)
def test_missing_devices_and_precisions_are_reported_before_a_file_is_read(
    name: str, precision: Precision, code: ErrorCode, tmp_path: Path
) -> None:
    """The machine of this test has no GPU."""
    graph, out = tmp_path / "missing.onnx", tmp_path / "engine"
    for attempt in (
        lambda: target(name).check(precision=precision),
        lambda: target(name)(graph, out, precision=precision),
    ):
        with pytest.raises(TargetMissingError) as error:
            attempt()
        assert error.value.code is code
    assert not out.exists()
    assert "tensorrt" not in sys.modules, "TensorRT ends a process that has no GPU"


def test_a_missing_device_is_reported() -> None:
    assert target("ort").missing() is None
    assert target("trt").missing() is not None


@pytest.mark.zoo
def test_what_handles_graphs_only_imports_without_torch_and_without_tensorrt() -> None:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    ("usual", "other_sizes", "expected"),
    [
        ((1, 8, 32), (), (1, 8, 32)),
        ((128, 384), (), (128, 384, 384)),
        ((8,), (1, 3), (1, 8, 8)),
        ((4,), (64,), (4, 4, 64)),
    ],
)
def test_the_usual_size_is_the_middle_of_those_optimized_for(
    usual: tuple[int, ...], other_sizes: tuple[int, ...], expected: tuple[int, int, int]
) -> None:
    assert span(usual, other_sizes) == expected


def test_messages(tmp_path: Path) -> None:
    """The messages about a target that cannot be used."""
    with pytest.raises(UsageError) as error:
        target("ortt")
    assert str(error.value) == f"ortt: unknown target; did you mean ort? choose one of {', '.join(TARGETS)}"
    with pytest.raises(UsageError) as error:
        target("trt").check(provider="cpu")
    assert str(error.value) == ("--provider cpu: TensorRT runs on cuda only; omit --provider, or use --target ort")
    with pytest.raises(TargetMissingError) as missing:
        target("trt").check()
    assert str(missing.value) == (
        "trt: there is no NVIDIA GPU here, or no driver for it (libcuda); to build on the machine with the GPU, copy"
        " the folder of a run there and run compress build OUT --target trt"
    )


@pytest.mark.parametrize(
    ("name", "precision", "file"),
    [
        ("ort", "fp32", None),
        ("ort", "int8", "model.int8.onnx"),
        ("openvino", "int8", "model.int8.onnx"),
        ("trt", "fp16", None),
        ("trt", "int8", "model.int8.symmetric.onnx"),
        ("trt", "fp8", "model.fp8.onnx"),
    ],
)
def test_engines_in_8_bits_are_built_from_the_quantized_graph_of_their_target(
    name: str, precision: Precision, file: str | None
) -> None:
    assert target(name).quantized_graph(precision) == file
    assert target(name).sources(precision)[0] == (None if name == "ort" else file)


@pytest.mark.parametrize("name", ["ort", "openvino"])
def test_fp8_is_refused_by_targets_that_lack_it(name: str) -> None:
    if name == "openvino":
        pytest.importorskip("openvino")
    with pytest.raises(TargetMissingError) as error:
        target(name).check(precision="fp8")
    assert (error.value.code, error.value.details["value"]) == (ErrorCode.UNSUPPORTED, "fp8")
