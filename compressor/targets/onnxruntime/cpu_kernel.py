"""Compile the kernel of block-sparse attention for ONNX Runtime on the CPU, on the machine that runs it.

The graph is the same with and without the kernel: a session with the kernel's library runs the kernel in place of the
function `BlockSparseAttention`, and a session without it runs the function's body.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from compressor.errors import ErrorCode, InputError, MismatchError, TargetMissingError, UsageError
from compressor.silence_libraries import one_line
from compressor.targets.base import TOLERANCE
from compressor.targets.onnxruntime import ort_session
from compressor.targets.relative_error import relative_error
from graph_passes import BlockMask, save
from graph_passes.block_sparse.function import block_sparse_attention, standalone_model
from graph_passes.block_sparse.spec import AttentionSpec

SOURCE = Path(__file__).with_name("block_sparse.cpp")
_HEADER = "onnxruntime_cxx_api.h"
_PREFIXES = ("/usr", "/usr/local", "/opt/onnxruntime")
_FOLDERS = ("include/onnxruntime", "include/onnxruntime/core/session", "include")
_COMPILERS = ("c++", "g++", "clang++")
_CASES = ((64, 64, 3), (16, 64, 2), (8, 20, 1), (128, 72, 2))
"""Block size, head width and blocks per side of the attentions that a kernel is compared on.

The second and the fourth are causal; the others have a memory, persistent vectors and a bias per head."""
_log = logging.getLogger(__name__)


def compile_kernel(out: Path, include: Path | None = None, march: str = "native", source: Path = SOURCE) -> float:
    """Compile the kernel, and keep it if it computes what the function's body computes.

    Args:
        out: the library to write; an existing file stays unchanged if anything fails.
        include: folder of ONNX Runtime's C++ headers, of the installed version or an older one; None: the folders that
            packages install them in.
        march: processor to compile for, as the compiler's `-march` takes it.

    Returns:
        The largest relative error against the function's body.

    Raises:
        TargetMissingError: there is no C++ compiler, or there are no headers.
        InputError: the source does not compile, or ONNX Runtime cannot load the library.
        MismatchError: the kernel computes something else.
    """
    compiler = _compiler()
    headers = _headers(include)
    _require_older(headers)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        library = Path(folder) / out.name
        _run_compiler(compiler, headers, march, source, library)
        try:
            error = _largest_error(library, Path(folder))
        except (UsageError, InputError) as failure:
            text = f"{compiler[0]}: produced no library ({failure}); use another compiler (CXX) or --march"
            raise InputError(text, code=ErrorCode.RUNTIME_FAILED, compiler=compiler[0]) from failure
        if not error <= TOLERANCE["fp32"]:
            text = (
                f"{out}: the kernel differs from the function by {error:.1e}; compile it for an older processor"
                " (--march x86-64-v3), or run without a kernel"
            )
            raise MismatchError(text, code=ErrorCode.OUTPUTS_DIFFER, path=out, error=error, tolerance=TOLERANCE["fp32"])
        library.replace(out)
    _log.debug("compiled %s with %s, relative error %.1e", out, compiler[0], error)
    return error


def _compiler() -> list[str]:
    variable = os.environ.get("CXX", "")
    try:
        named = shlex.split(variable)
    except ValueError as error:
        text = f"CXX {variable!r}: not a command ({error}); set it to a compiler"
        raise UsageError(text, code=ErrorCode.INVALID_VALUE, field="CXX", value=variable) from error
    command = named or [name for name in _COMPILERS if shutil.which(name)][:1]
    if not command or shutil.which(command[0]) is None:
        missing = f"{named[0]}, which CXX names," if named else "a C++ compiler"
        text = f"kernel: {missing} is not installed; install g++ or clang++, or set CXX"
        raise TargetMissingError(text, code=ErrorCode.PACKAGE_MISSING, package=named[0] if named else "c++")
    return command


def _headers(include: Path | None) -> Path:
    """The folder that holds ONNX Runtime's C++ header."""
    if include is not None:
        folders: Iterable[Path] = (include, *(include / folder for folder in _FOLDERS))
    else:
        prefixes = [*filter(None, [os.environ.get("CONDA_PREFIX")]), *_PREFIXES]
        folders = (Path(prefix) / folder for prefix in prefixes for folder in _FOLDERS)
    for folder in folders:
        if (folder / _HEADER).is_file():
            return folder
    text = (
        f"kernel: ONNX Runtime's header {_HEADER} is not {'in ' + str(include) if include else 'installed'}; name its"
        " folder (--include): Debian's libonnxruntime-dev and every archive of an ONNX Runtime release contain it"
    )
    raise TargetMissingError(text, code=ErrorCode.PACKAGE_MISSING, package=_HEADER, path=include)


def _require_older(headers: Path) -> None:
    """Raise InputError for headers that are newer than the runtime, which lacks the new parts of the interface."""
    path = headers / "onnxruntime_c_api.h"
    text = path.read_text() if path.is_file() else ""
    version = re.search(r"^#define ORT_API_VERSION (\d+)", text, re.MULTILINE)
    if version and int(version[1]) > int(ort.__version__.split(".")[1]):
        problem = (
            f"{headers}: headers of ONNX Runtime 1.{version[1]}, and {ort.__version__} is installed; name headers of"
            " that version or an older one (--include)"
        )
        raise InputError(problem, code=ErrorCode.FILE_MISMATCH, path=headers, value=int(version[1]))


def _run_compiler(compiler: list[str], headers: Path, march: str, source: Path, library: Path) -> None:
    flags = ["-std=c++17", "-O3", f"-march={march}", "-fPIC", "-shared", "-fvisibility=hidden"]
    command = [*compiler, *flags, f"-I{headers}", str(source), "-o", str(library)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        lines = process.stderr.splitlines()
        last = lines[-1] if lines else f"exit status {process.returncode}"
        reason = one_line(next((line for line in lines if "error" in line), last))
        text = f"{compiler[0]}: cannot compile the kernel ({reason}); use another compiler (CXX) or --march"
        raise InputError(text, code=ErrorCode.RUNTIME_FAILED, compiler=compiler[0], status=process.returncode)


def _largest_error(library: Path, scratch: Path) -> float:
    """The largest relative error of the kernel against the function's body, over all cases."""
    plain, native = (ort_session.session_settings("cpu", None, kernel) for kernel in (None, library))
    worst = 0.0
    for seed, (block, dim, side) in enumerate(_CASES):
        model, feeds = _case(block, dim, side, seed)
        graph = scratch / "case.onnx"
        save(model, graph)
        expected, outputs = (
            ort_session.run_session(ort_session.open_session(graph, settings), feeds)["output"]
            for settings in (plain, native)
        )
        worst = max(worst, relative_error(expected, outputs, {}))
    return worst


def _case(block: int, dim: int, side: int, seed: int) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """A graph of one attention with two heads and three quarters of its blocks, and a padded batch for it.

    The lengths are no multiples of the block size.
    """
    rng = np.random.default_rng(seed)
    causal = bool(seed % 2)
    memory, persistent = (0, 0) if causal else (block, 3)
    mask = BlockMask(rng.random((2, side, side + bool(memory))) < 0.75, block, memory)
    spec = AttentionSpec(mask, dim, dim, dim**-0.5, causal, persistent, full_heads=0 if causal else 2)
    function = block_sparse_attention(spec, row=True)
    length = side * block - 3
    keys = length + memory // 2 + persistent
    row = np.zeros((2, 1, 1, keys), np.float32)
    row[1, ..., -block // 2 :] = np.finfo(np.float32).min
    sizes = {"query": length, "key": keys, "value": keys}
    inputs = {
        **{name: rng.standard_normal((2, size, 2, dim), np.float32) for name, size in sizes.items()},
        "block_mask": mask.kept,
        "row": row,
        "full": rng.standard_normal((2, 2, length, keys), np.float32),
    }
    feeds = {str(value.name): inputs[str(value.name)] for value in function.inputs}
    return standalone_model(function), feeds
