"""Sessions of ONNX Runtime: choose a provider, record settings, load and run graphs, and count executed operators."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compressor import silence_libraries
from compressor.errors import ErrorCode, InputError, TargetMissingError, UsageError
from compressor.targets.base import Feeds, Precision, Provider, missing_input
from compressor.targets.machine import usable_cores

try:
    import onnxruntime as ort
except ImportError as error:
    text = "ONNX Runtime is not installed (.[gpu] has it for CUDA)"
    raise TargetMissingError.of_package("onnxruntime", "cpu", text) from error

_SEVERITY_FATAL = 4
PROVIDERS: Mapping[Provider, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""ONNX Runtime's names of the providers."""
_log = logging.getLogger(__name__)


def has_cuda() -> bool:
    """Whether this machine has an NVIDIA GPU and the installed ONNX Runtime was built for it."""
    # onnxruntime-gpu lists CUDA on any machine; the driver's tools exist only where there is a device.
    return PROVIDERS["cuda"] in ort.get_available_providers() and shutil.which("nvidia-smi") is not None


def choose_provider(provider: Provider | None, precision: Precision, kernel: Path | None = None) -> Provider:
    """The provider to run on.

    Args:
        provider: the requested provider; None: the CPU for a kernel, else CUDA where this machine has it, else the CPU.
        precision: numeric precision that the provider must support.
        kernel: library of `compress kernel`, which runs on the CPU.

    Raises:
        TargetMissingError: this machine lacks the provider, or the provider does not compute in the precision.
    """
    cuda = has_cuda()
    if provider == "cuda" and not cuda:
        text = (
            "cuda: ONNX Runtime finds no CUDA device; use the cpu provider, or pip install '.[gpu]' in a checkout of"
            " compressor on a machine with an NVIDIA GPU"
        )
        raise TargetMissingError(text, code=ErrorCode.DEVICE_MISSING, field="provider", value=provider)
    chosen: Provider = provider or ("cuda" if cuda and kernel is None and precision != "int8" else "cpu")
    code, reason = ErrorCode.UNSUPPORTED, ""
    if precision == "bf16":
        reason = "ONNX Runtime implements few operators in bfloat16; use fp32, or --target openvino or trt"
    elif precision == "fp8":
        reason = "ONNX Runtime has no matmuls in fp8; use int8 or fp32, or --target trt"
    elif precision == "int8" and chosen == "cuda":
        reason = "ONNX Runtime runs few matmuls in int8 on a GPU; use the cpu provider, or --target trt"
    elif precision == "fp16" and chosen == "cpu":
        code = ErrorCode.DEVICE_MISSING
        reason = (
            "ONNX Runtime computes in half precision on a GPU only, and this run is on the CPU; use fp32, or pip"
            " install '.[gpu]' in a checkout of compressor on a machine with an NVIDIA GPU"
        )
    if reason:
        raise TargetMissingError(f"{precision}: {reason}", code=code, field="precision", value=precision)
    return chosen


def session_settings(provider: Provider, threads: int | None, kernel: Path | None = None) -> dict[str, Any]:
    """Runtime and options of a session, as recorded in reports; `open_session` reads them.

    Args:
        provider: the provider that runs the session.
        threads: threads per call; None: one per core.
        kernel: library of `compress kernel`; None: no kernel.

    Raises:
        UsageError: the kernel is missing, or is for another provider.
        InputError: ONNX Runtime cannot load the kernel.
    """
    settings: dict[str, Any] = {
        "runtime": f"onnxruntime {ort.__version__}",
        "provider": PROVIDERS[provider],
        "intra_op_threads": threads or usable_cores(),
        "inter_op_threads": 1,
        "execution_mode": "sequential",
        "graph_optimization": "all",
    }
    if provider == "cuda":
        # TensorFloat-32 has ten bits of mantissa: it is not fp32.
        settings["provider_options"] = {"use_tf32": "0"}
    if kernel is not None:
        if provider != "cpu":
            raise UsageError(
                f"--kernel {kernel}: runs on the CPU; omit --kernel, or --provider {provider}",
                code=ErrorCode.CONTRADICTION,
                fields=("kernel", "provider"),
                value=kernel,
            )
        if not kernel.is_file():
            raise UsageError(
                f"--kernel {kernel}: no such file; build it with compress kernel -o {kernel}",
                code=ErrorCode.FILE_MISSING,
                field="kernel",
                path=kernel,
            )
        settings["kernel"] = os.fspath(kernel.resolve())
        _register(settings["kernel"], ort.SessionOptions())
    return settings


def open_session(
    path: Path,
    settings: Mapping[str, Any],
    *,
    profile: Path | None = None,
    sizes: Mapping[str, int] | None = None,
) -> ort.InferenceSession:
    """Load a graph.

    Args:
        settings: from `session_settings`; `graph_optimization` may be `none`.
        profile: prefix of the file to write a profile of the executed operators to; None: no profile.
        sizes: name of a free axis -> the size that it is fixed to; None: axes stay free.

    Raises:
        InputError: ONNX Runtime cannot load the graph.
        TargetMissingError: ONNX Runtime cannot start the provider.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings["intra_op_threads"]
    options.inter_op_num_threads = settings["inter_op_threads"]
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    level = ort.GraphOptimizationLevel
    off = settings["graph_optimization"] == "none"
    options.graph_optimization_level = level.ORT_DISABLE_ALL if off else level.ORT_ENABLE_ALL
    options.log_severity_level = _SEVERITY_FATAL
    for name, size in (sizes or {}).items():
        options.add_free_dimension_override_by_name(name, size)
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = os.fspath(profile)
    if "kernel" in settings:
        _register(settings["kernel"], options)
    if settings["provider"] == PROVIDERS["cuda"]:
        _load_cuda()
    # Operators that CUDA lacks run on the CPU.
    providers: list[Any] = [(settings["provider"], settings.get("provider_options", {}))]
    if settings["provider"] != PROVIDERS["cpu"]:
        providers.append(PROVIDERS["cpu"])
    try:
        session = ort.InferenceSession(os.fspath(path), options, providers=providers)
    except Exception as error:  # the exceptions of ONNX Runtime share no other base class
        half = "kernel" in settings and "float16" in str(error)
        remedy = "the kernel computes in fp32 only, omit --kernel" if half else "export the graph again"
        text = f"{path}: ONNX Runtime cannot load it ({error_line(error)}); {remedy}"
        raise InputError(text, code=ErrorCode.RUNTIME_FAILED, path=path) from error
    if settings["provider"] not in session.get_providers():
        text = (
            f"{settings['provider']}: ONNX Runtime could not start it; check the driver and the CUDA libraries, or use"
            " the cpu provider"
        )
        raise TargetMissingError(text, code=ErrorCode.DEVICE_MISSING, field="provider", value=settings["provider"])
    _log.debug("loaded %s on %s", path, settings["provider"])
    return session


@functools.cache
def _load_cuda() -> None:
    """Load the CUDA libraries that pip has installed; the provider itself searches the system's folders only."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the names of missing libraries
        ort.preload_dlls()


def _register(kernel: str, options: ort.SessionOptions) -> None:
    """Register a kernel's library with the options of a session."""
    try:
        options.register_custom_ops_library(kernel)
    except Exception as error:  # the exceptions of ONNX Runtime share no other base class
        text = (
            f"{kernel}: ONNX Runtime cannot load this kernel ({error_line(error)}); build it on this machine (compress"
            " kernel), or omit it"
        )
        raise InputError(text, code=ErrorCode.RUNTIME_FAILED, field="kernel", path=Path(kernel)) from error


def run_session(session: ort.InferenceSession, feeds: Feeds) -> dict[str, Any]:
    """Outputs by name; feeds without an input of the graph are ignored.

    Raises:
        InputError: an input is missing, or the graph cannot run on these inputs.
    """
    names = [value.name for value in session.get_inputs()]
    try:
        outputs = session.run(None, {name: feeds[name] for name in names})
    except KeyError as error:
        raise missing_input(error.args[0], names) from error
    except Exception as error:  # the exceptions of ONNX Runtime share no other base class
        text = f"ONNX Runtime cannot run the graph on these inputs ({error_line(error)})"
        raise InputError(text, code=ErrorCode.RUNTIME_FAILED) from error
    return {value.name: output for value, output in zip(session.get_outputs(), outputs, strict=True)}


def run_bound(session: ort.InferenceSession, binding: ort.IOBinding) -> None:
    """Run a graph on the inputs and outputs of a binding.

    Raises:
        InputError: the graph cannot run on these inputs.
    """
    try:
        session.run_with_iobinding(binding)
    except Exception as error:  # the exceptions of ONNX Runtime share no other base class
        text = f"ONNX Runtime cannot run the graph on these inputs ({error_line(error)})"
        raise InputError(text, code=ErrorCode.RUNTIME_FAILED) from error


def runner(path: Path, settings: Mapping[str, Any]) -> Callable[[Feeds], dict[str, Any]]:
    """Load a graph, and return a function that runs it."""
    session = open_session(path, settings)
    return lambda feeds: run_session(session, feeds)


def unoptimized_runner(path: Path) -> Callable[[Feeds], dict[str, Any]]:
    """Load a graph without optimizations on the CPU, and return a function that computes expected outputs with it."""
    return runner(path, {**session_settings("cpu", None), "graph_optimization": "none"})


def executed_operators(path: Path, settings: Mapping[str, Any], feeds: Feeds) -> dict[str, int]:
    """Number of executed operators by type, after all optimizations of the runtime.

    Raises:
        InputError: ONNX Runtime cannot load the graph, or cannot run it on these inputs.
    """
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(path, settings, profile=Path(folder) / "profile")
        try:
            run_session(session, feeds)
        finally:
            profile = Path(session.end_profiling())
        events = json.loads(profile.read_text(encoding="utf-8"))
    nodes = {
        (event["name"], event["args"]["node_index"]): event["args"]["op_name"]
        for event in events
        if event.get("cat") == "Node" and "op_name" in event.get("args", {})
    }
    return dict(collections.Counter(nodes.values()))


def error_line(error: BaseException) -> str:
    """An exception's message on one line, without the prefixes of ONNX Runtime."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from \S+ failed:)?", "", str(error))
    return silence_libraries.one_line(text or type(error).__name__)
