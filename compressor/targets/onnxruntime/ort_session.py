"""ONNX Runtime sessions: which provider, which options, and what the runtime executes in the end."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import psutil

from compressor import silence_libraries
from compressor.errors import InputError, TargetMissingError, UsageError
from compressor.targets.base import Feeds, Precision, Provider

try:
    import onnxruntime as ort
except ImportError as error:
    raise TargetMissingError(
        "ort: ONNX Runtime is not installed; pip install 'compressor[cpu]' (or [gpu] for CUDA)"
    ) from error

_ONLY_FATAL = 4
PROVIDERS: dict[Provider, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def choose(provider: Provider | None, precision: Precision, kernel: Path | None = None) -> Provider:
    """The provider to run on: the one asked for, else the CPU for a kernel, else CUDA where this machine has it.

    Raises:
        TargetMissingError: it is not on this machine, or it does not compute in the precision.
    """
    # onnxruntime-gpu offers CUDA on any machine; whether there is a device is for the driver to say.
    there = PROVIDERS["cuda"] in ort.get_available_providers() and shutil.which("nvidia-smi") is not None
    if provider == "cuda" and not there:
        raise TargetMissingError(
            "cuda: ONNX Runtime finds no CUDA device here; pip install 'compressor[gpu]' on a machine with an NVIDIA "
            "GPU, or use the cpu provider"
        )
    if precision == "bf16":
        raise TargetMissingError("bf16: ONNX Runtime computes few operators in it; use fp16 or fp32, or --target trt")
    chosen: Provider = provider or ("cuda" if there and kernel is None else "cpu")
    if precision == "fp16" and chosen == "cpu":
        raise TargetMissingError(
            "fp16: ONNX Runtime computes in half precision on a GPU only, and this run is on the CPU; use fp32, or "
            "pip install 'compressor[gpu]' on a machine with an NVIDIA GPU"
        )
    return chosen


def cores() -> int:
    """Physical cores that this process may run on: ONNX Runtime gains nothing from a second thread on a core."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        allowed = os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def describe(provider: Provider, threads: int | None, kernel: Path | None = None) -> dict[str, Any]:
    """Runtime and options of a session, as they are recorded: `open_session` takes them from here.

    Args:
        provider: where it runs.
        threads: of one call; None: one a core.
        kernel: library of a compiled kernel (see `native`).

    Raises:
        UsageError: the kernel is not there, or is for another provider.
        InputError: ONNX Runtime cannot load it.
    """
    described: dict[str, Any] = {
        "runtime": f"onnxruntime {ort.__version__}",
        "provider": PROVIDERS[provider],
        "intra_op_threads": threads or cores(),
        "inter_op_threads": 1,
        "execution_mode": "sequential",
        "graph_optimization": "all",
    }
    if provider == "cuda":
        # TensorFloat-32 keeps ten bits of a number: it is not fp32.
        described["provider_options"] = {"use_tf32": "0"}
    if kernel is not None:
        if provider != "cpu":
            raise UsageError(f"--kernel {kernel}: is for the CPU; leave it out, or --provider {provider}")
        if not kernel.is_file():
            raise UsageError(f"--kernel {kernel}: there is no such file; compress kernel -o {kernel} makes it")
        described["kernel"] = os.fspath(kernel.resolve())
        _register(described["kernel"], ort.SessionOptions())
    return described


def open_session(path: Path, session: dict[str, Any], *, profile: Path | None = None) -> ort.InferenceSession:
    """Load a graph.

    Args:
        path: the ONNX file.
        session: as `describe` gives it; `graph_optimization` may be `none`.
        profile: prefix of the file to write what was executed to.

    Raises:
        InputError: ONNX Runtime cannot load the graph.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = session["intra_op_threads"]
    options.inter_op_num_threads = session["inter_op_threads"]
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    level = ort.GraphOptimizationLevel
    off = session["graph_optimization"] == "none"
    options.graph_optimization_level = level.ORT_DISABLE_ALL if off else level.ORT_ENABLE_ALL
    options.log_severity_level = _ONLY_FATAL
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = os.fspath(profile)
    if "kernel" in session:
        _register(session["kernel"], options)
    if session["provider"] == PROVIDERS["cuda"]:
        _load_cuda()
    # CUDA leaves the operators that it lacks to the CPU.
    providers: list[Any] = [(session["provider"], session.get("provider_options", {}))]
    if session["provider"] != PROVIDERS["cpu"]:
        providers.append(PROVIDERS["cpu"])
    try:
        opened = ort.InferenceSession(os.fspath(path), options, providers=providers)
    except Exception as error:  # ONNX Runtime's own exceptions share no base but this one
        mend = "export it again"
        if "kernel" in session and "float16" in str(error):
            mend = "the kernel computes in fp32 alone, leave it out (--kernel)"
        raise InputError(f"{path}: ONNX Runtime cannot load it ({one_line(error)}); {mend}") from error
    if session["provider"] not in opened.get_providers():
        raise TargetMissingError(
            f"{session['provider']}: ONNX Runtime could not start it; check the driver and the CUDA libraries, or use "
            "the cpu provider"
        )
    return opened


@functools.cache
def _load_cuda() -> None:
    """Load the CUDA libraries that pip has installed: the provider looks for them on the system alone."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find
        ort.preload_dlls()


def _register(kernel: str, options: ort.SessionOptions) -> None:
    """Have sessions of these options compute with the kernel."""
    try:
        options.register_custom_ops_library(kernel)
    except Exception as error:  # ONNX Runtime's own exceptions share no base but this one
        raise InputError(
            f"{kernel}: ONNX Runtime cannot load this kernel ({one_line(error)}); compile it here (compress kernel), or"
            " leave it out"
        ) from error


def run(session: ort.InferenceSession, feeds: Feeds) -> dict[str, Any]:
    """Outputs by name. Inputs that the graph does not have are left out.

    Raises:
        InputError: an input is missing, or the graph cannot run on these.
    """
    names = [value.name for value in session.get_inputs()]
    try:
        outputs = session.run(None, {name: feeds[name] for name in names})
    except KeyError as error:
        raise InputError(f"the graph wants an input named {error.args[0]}; give {', '.join(names)}") from error
    except Exception as error:  # ONNX Runtime's own exceptions share no base but this one
        raise InputError(f"ONNX Runtime cannot run the graph on these inputs ({one_line(error)})") from error
    return {value.name: output for value, output in zip(session.get_outputs(), outputs, strict=True)}


def executed(path: Path, session: dict[str, Any], feeds: Feeds) -> dict[str, int]:
    """How many operators of each type the runtime executes, after all of its own optimizations."""
    with tempfile.TemporaryDirectory() as folder:
        profiled = open_session(path, session, profile=Path(folder) / "profile")
        with contextlib.ExitStack() as stack:
            written: list[str] = []
            stack.callback(lambda: written.append(profiled.end_profiling()))
            run(profiled, feeds)
        events = json.loads(Path(written[0]).read_text(encoding="utf-8"))
    nodes = {
        (event["name"], event["args"]["node_index"]): event["args"]["op_name"]
        for event in events
        if event.get("cat") == "Node" and "op_name" in event.get("args", {})
    }
    return dict(collections.Counter(nodes.values()))


def one_line(error: BaseException) -> str:
    """An exception's message without ONNX Runtime's prefixes and line breaks, cut where it rambles."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from \S+ failed:)?", "", str(error))
    return silence_libraries.one_line(text or type(error).__name__)
