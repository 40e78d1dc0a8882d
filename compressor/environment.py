"""The machine and the package versions that measurements depend on."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import psutil

from compressor.errors import TargetMissingError

_PACKAGES = (
    *("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu", "openvino", "nncf"),
    "compressor",
)
_INT8_FLAGS = ("amx_int8", "avx512_vnni", "avx_vnni", "avx_vnni_int8", "i8mm", "asimddp")
"""Flags of processors whose sums of products of 8-bit integers are exact and fast."""
_BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Flags of processors that multiply bfloat16 matrices natively."""
INT8_INSTRUCTIONS = "int8 instructions"
BFLOAT16_INSTRUCTIONS = "bfloat16 instructions"
INSTRUCTIONS = (INT8_INSTRUCTIONS, BFLOAT16_INSTRUCTIONS)
"""Fields of `machine` that decide how products in int8 and in bfloat16 are computed."""
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Devices of Linux by which the drivers of NVIDIA, of AMD and of Windows beneath reach a GPU."""
COMPARABLE_FIELDS = ("processor", "cores", "memory")
"""Fields of `machine` that must match before timings are comparable."""


PYTORCH_PACKAGES = ("torch", "transformers", "accelerate", "optimum", "pytorch_optimizer", "requests", "sacrebleu")
"""Packages, by the names of their imports, of commands that load a model folder: those of the extra `pytorch`, which
the extras `cpu` and `gpu` include."""
ROW_PACKAGES = ("datasets", "highspy", "pyarrow", "threadpoolctl", "tokenizers")
"""Packages, by the names of their imports, of commands that read rows: those of the extra `rows`, which the extras
`onnx`, `cpu` and `gpu` include."""


def has_pytorch() -> bool:
    """Whether everything is installed that loads a model folder and rows."""
    return all(find_spec(name) is not None for name in (*PYTORCH_PACKAGES, *ROW_PACKAGES))


def has_gpu() -> bool:
    """Whether PyTorch is installed and can compute on a GPU of this machine; it is loaded only where there is one."""
    if not has_pytorch() or (sys.platform == "linux" and not any(map(os.path.exists, _GPU_FILES))):
        return False
    import torch

    return bool(torch.cuda.is_available())


def require_pytorch() -> None:
    """Raise TargetMissingError unless everything is installed that loads a model folder and rows."""
    for name in (*PYTORCH_PACKAGES, *ROW_PACKAGES):
        if find_spec(name) is None:
            raise _not_installed(name)


def missing_pytorch(error: BaseException) -> TargetMissingError | None:
    """The error of a command that needs PyTorch or rows, where they are missing; None: `error` has another reason.

    Args:
        error: what an import raised.
    """
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return _not_installed(name) if name in (*PYTORCH_PACKAGES, *ROW_PACKAGES) else None


def _not_installed(package: str) -> TargetMissingError:
    name = "PyTorch" if package == "torch" else f"the package {package}"
    extra = "onnx" if package in ROW_PACKAGES else "cpu"
    return TargetMissingError.of_package(package, extra, f"this needs {name}, which is not installed")


def machine() -> dict[str, str]:
    """Processor, cores, memory, operating system, and the versions of Python and of the installed packages."""
    versions = {name: package_version(name) for name in _PACKAGES}
    return {
        "processor": processor(),
        INT8_INSTRUCTIONS: ", ".join(int8_instructions()) or "none",
        BFLOAT16_INSTRUCTIONS: ", ".join(bfloat16_instructions()) or "none",
        "cores": f"{psutil.cpu_count(logical=False) or '?'} ({psutil.cpu_count()} threads)",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: installed for name, installed in versions.items() if installed is not None},
    }


def processor() -> str:
    """The processor's model name, e.g. `AMD EPYC 9655`; its architecture where the system does not report a name."""
    names = (line.partition(":")[2].strip() for line in _processor_lines("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def int8_instructions() -> tuple[str, ...]:
    """Instruction sets of the processor that compute exact sums of products of 8-bit integers, by their Linux names."""
    return _instructions(_INT8_FLAGS)


def bfloat16_instructions() -> tuple[str, ...]:
    """Instruction sets of the processor that multiply bfloat16 matrices, by their Linux names."""
    return _instructions(_BFLOAT16_FLAGS)


def _instructions(names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` that the processor has; none where the system does not report them."""
    flags = next((line.split() for line in _processor_lines("flags", "Features")), [])
    return tuple(name for name in names if name in flags)


def _processor_lines(*starts: str) -> list[str]:
    """The lines of `/proc/cpuinfo` that begin with one of `starts`; none on a system without it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.startswith(starts)]


def release_memory() -> None:
    """Return free memory of this process to the system: glibc keeps much of what large arrays and sessions held."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def package_version(package: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
