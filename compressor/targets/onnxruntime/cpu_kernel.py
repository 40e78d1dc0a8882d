"""A compiled kernel of block-sparse attention for ONNX Runtime on the CPU, made from source on the machine it is for.

The graph does not change: a session that has the kernel's library runs it in place of the function of that name, one
that has not runs the function's body.
"""

from __future__ import annotations

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

from compressor.errors import InputError, MismatchError, TargetMissingError, UsageError
from compressor.silence_libraries import one_line
from compressor.targets.base import TOLERANCE
from compressor.targets.onnxruntime import ort_session as sessions
from compressor.targets.relative_error import relative_error
from graph_passes import BlockMask, save
from graph_passes.block_sparse.function import block_sparse_attention, standalone_model

SOURCE = Path(__file__).with_name("block_sparse.cpp")
_HEADER = "onnxruntime_cxx_api.h"
_PREFIXES = ("/usr", "/usr/local", "/opt/onnxruntime")
_FOLDERS = ("include/onnxruntime", "include/onnxruntime/core/session", "include")
_COMPILERS = ("c++", "g++", "clang++")
_SHAPES = ((64, 64, 3), (16, 64, 2), (8, 20, 1), (128, 72, 2))
"""Block, width of a head, and blocks along a side: what a kernel is tried on. Every other one is causal, the others
have remembered keys, persistent vectors and a bias of each head."""


def compile_kernel(out: Path, include: Path | None = None, march: str = "native") -> float:
    """Compile the kernel, and keep it if it computes what the function's body computes.

    Args:
        out: the library; it is replaced whole or stays as it was.
        include: folder of ONNX Runtime's C++ headers, of the installed version or an older one; None: where a
            package would put them.
        march: processor to compile for, in the compiler's words.

    Returns:
        The largest relative error against the body.

    Raises:
        TargetMissingError: there is no C++ compiler, or no headers.
        InputError: it does not compile, or ONNX Runtime cannot load it.
        MismatchError: it computes something else.
    """
    command = [*_compiler(), "-std=c++17", "-O3", f"-march={march}", "-fPIC", "-shared", "-fvisibility=hidden"]
    headers = _headers(include)
    _require_older(headers)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        made = Path(folder) / out.name
        done = subprocess.run(
            [*command, f"-I{headers}", str(SOURCE), "-o", str(made)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = done.stderr.splitlines()
            told = next((line for line in lines if "error" in line), lines[-1] if lines else f"exit {done.returncode}")
            raise InputError(
                f"{command[0]}: cannot compile the kernel ({one_line(told)}); use another compiler (CXX) or --march"
            )
        try:
            error = _error(made, Path(folder))
        except (UsageError, InputError) as fault:
            raise InputError(
                f"{command[0]}: made no library ({fault}); use another compiler (CXX) or --march"
            ) from fault
        if not error <= TOLERANCE["fp32"]:
            raise MismatchError(
                f"{out}: the kernel differs from the function by {error:.1e}; compile it for an older processor"
                " (--march x86-64-v3), or leave it out"
            )
        made.replace(out)
    return error


def _compiler() -> list[str]:
    given = os.environ.get("CXX", "")
    try:
        named = shlex.split(given)
    except ValueError as error:
        raise UsageError(f"CXX {given!r}: is no command ({error}); name a compiler") from error
    found = named or [name for name in _COMPILERS if shutil.which(name)][:1]
    if not found or shutil.which(found[0]) is None:
        which = f"{named[0]}, which CXX names," if named else "a C++ compiler"
        raise TargetMissingError(f"kernel: {which} is not on this machine; install g++ or clang++, or set CXX")
    return found


def _headers(include: Path | None) -> Path:
    """The folder that holds the header."""
    if include is not None:
        places: Iterable[Path] = (include, *(include / folder for folder in _FOLDERS))
    else:
        prefixes = [*filter(None, [os.environ.get("CONDA_PREFIX")]), *_PREFIXES]
        places = (Path(prefix) / folder for prefix in prefixes for folder in _FOLDERS)
    for place in places:
        if (place / _HEADER).is_file():
            return place
    raise TargetMissingError(
        f"kernel: ONNX Runtime's header {_HEADER} is not {'in ' + str(include) if include else 'on this machine'}; name"
        " its folder (--include): Debian's libonnxruntime-dev has it, and every archive of an ONNX Runtime release"
    )


def _require_older(headers: Path) -> None:
    """A library is of use only to a runtime that has the interface of its headers."""
    told = headers / "onnxruntime_c_api.h"
    version = re.search(r"^#define ORT_API_VERSION (\d+)", told.read_text() if told.is_file() else "", re.MULTILINE)
    if version and int(version[1]) > int(ort.__version__.split(".")[1]):
        raise InputError(
            f"{headers}: are the headers of ONNX Runtime 1.{version[1]}, and {ort.__version__} is installed; name those"
            " of its version or an older one (--include)"
        )


def _error(library: Path, scratch: Path) -> float:
    """The largest relative error of the kernel against the body, over a few masks."""
    plain = sessions.describe("cpu", None)
    worst = 0.0
    for seed, (block, dim, side) in enumerate(_SHAPES):
        model, feeds = _case(block, dim, side, seed)
        graph = scratch / "case.onnx"
        save(model, graph)
        body, kernel = (
            sessions.run(sessions.open_session(graph, session), feeds)["output"]
            for session in (plain, sessions.describe("cpu", None, library))
        )
        worst = max(worst, relative_error(body, kernel, {}))
    return worst


def _case(block: int, dim: int, side: int, seed: int) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """One attention of two heads, three quarters of its blocks kept, over rows that end within a block; padded."""
    draw = np.random.default_rng(seed)
    causal = bool(seed % 2)
    memory, persistent = (0, 0) if causal else (block, 3)
    mask = BlockMask(draw.random((2, side, side + bool(memory))) < 0.75, block, memory)
    function = block_sparse_attention(
        mask, dim, dim, scale=dim**-0.5, causal=causal, row=True, full=0 if causal else 2, persistent=persistent
    )
    length = side * block - 3
    keys = length + memory // 2 + persistent
    row = np.zeros((2, 1, 1, keys), np.float32)
    row[1, ..., -block // 2 :] = np.finfo(np.float32).min
    given = {
        **{
            name: draw.standard_normal((2, size, 2, dim), np.float32)
            for name, size in (("query", length), ("key", keys), ("value", keys))
        },
        "block_mask": mask.kept,
        "row": row,
        "full": draw.standard_normal((2, 2, length, keys), np.float32),
    }
    feeds = {str(value.name): given[str(value.name)] for value in function.inputs}
    return standalone_model(function), feeds
