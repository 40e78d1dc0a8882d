"""Sessions of ONNX Runtime: the choice of a provider, and files that cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.errors import ErrorCode, InputError, TargetMissingError, UsageError
from compressor.targets import Precision, Provider
from compressor.targets.onnxruntime import ort_session


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_session.ort, "get_available_providers", lambda: ["CPUExecutionProvider"])


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ort_session.ort, "get_available_providers", lambda: list(ort_session.PROVIDERS.values()))
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("without_cuda")
def test_the_cpu_is_used_if_there_is_no_gpu() -> None:
    assert ort_session.choose_provider(None, "fp32") == "cpu"
    with pytest.raises(TargetMissingError) as error:
        ort_session.choose_provider("cuda", "fp32")
    assert (error.value.code, error.value.details["field"]) == (ErrorCode.DEVICE_MISSING, "provider")


@pytest.mark.usefixtures("with_cuda")
@pytest.mark.parametrize(
    ("requested", "precision", "kernel", "chosen"),
    [
        (None, "fp32", False, "cuda"),
        (None, "fp16", False, "cuda"),
        (None, "fp32", True, "cpu"),
        ("cpu", "fp32", False, "cpu"),
        ("cuda", "fp16", False, "cuda"),
    ],
)
def test_a_gpu_is_used_unless_the_cpu_is_requested_or_a_kernel_runs_there(
    requested: Provider | None, precision: Precision, kernel: bool, chosen: Provider, tmp_path: Path
) -> None:
    assert ort_session.choose_provider(requested, precision, tmp_path if kernel else None) == chosen


def test_a_kernel_is_for_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        ort_session.session_settings("cuda", None, tmp_path / "kernel.so")
    assert (error.value.code, error.value.details["fields"]) == (ErrorCode.CONTRADICTION, ("kernel", "provider"))
    with pytest.raises(UsageError) as error:
        ort_session.session_settings("cpu", None, tmp_path / "kernel.so")
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.FILE_MISSING, tmp_path / "kernel.so")


def test_cuda_computes_in_fp32_without_tensorfloat() -> None:
    assert ort_session.session_settings("cuda", 1)["provider_options"] == {"use_tf32": "0"}


def test_a_damaged_graph_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"no graph")
    with pytest.raises(InputError) as error:
        ort_session.open_session(path, ort_session.session_settings("cpu", 1))
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.RUNTIME_FAILED, path)
    assert "\n" not in str(error.value)
    assert "ONNXRuntimeError" not in str(error.value)
