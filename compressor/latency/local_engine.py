"""An engine on this machine that a check calls: an ONNX file in ONNX Runtime, or an engine built ahead of time."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor import report as reports
from compressor.errors import CompressorError, ErrorCode, InputError, UsageError
from compressor.measure import timing
from compressor.silence_libraries import one_line
from compressor.targets import BuildOptions, Engine, Target, target_of
from compressor.targets.base import Feeds, Precision
from compressor.targets.graph_facts import is_quantized, write_mixed
from compressor.targets.tensor_specs import TensorSpec
from compressor.targets.trial_inputs import has_random_inputs, id_limits, trial_feeds
from graph_passes import load
from graph_passes.errors import GraphPassError

_log = logging.getLogger(__name__)


@dataclass
class LocalEngine:
    """An engine that is loaded in this process; see `compressor.latency.endpoints.Endpoint`.

    Attributes:
        name: path of the file.
        engine: the loaded engine.
        inputs: the inputs that it takes.
        precision: numeric precision of its outputs.
        host: runtime and device.
        graph: ONNX file of the function that it computes.
        tolerance: largest relative error against it.
        lock: held during a call; only an engine with one execution context needs more than a null context.
        concurrency: maximum number of calls that are useful at the same time.
    """

    name: str
    engine: Engine
    inputs: tuple[TensorSpec, ...]
    precision: Precision
    host: str
    graph: Path
    tolerance: float
    lock: contextlib.AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    concurrency: int = 4

    @cached_property
    def _model(self) -> ir.Model:
        """The graph; raise InputError where that of an engine is not beside it."""
        if not self.graph.is_file():
            raise InputError(
                f"{self.name}: {self.graph.name}, the graph of the engine, is not beside it, so that no inputs can be"
                " drawn; copy it there, or give inputs (--inputs)",
                code=ErrorCode.FILE_MISSING,
                path=self.graph,
                field="inputs",
            )
        return load(self.graph)

    @property
    def id_limits(self) -> Mapping[str, int]:
        """Number of ids that the table of each input holds; empty without the graph."""
        if not self.graph.is_file():
            return {}
        with library_errors(self.graph):
            return id_limits(self._model)

    @property
    def has_random_inputs(self) -> bool:
        """Whether the graph carries no example rows."""
        with library_errors(self.graph):
            return has_random_inputs(self._model)

    def trial_batch(self, batch: int, seq: int, seed: int) -> Feeds:
        """A batch that is valid for the graph, from its example rows where it carries any."""
        with library_errors(self.graph):
            feeds = trial_feeds(self._model, batch, seq, seed=seed)
            return {tensor.name: feeds[tensor.name].astype(tensor.numpy) for tensor in self.inputs}

    def encode(self, feeds: Feeds) -> Feeds:
        """The batch itself."""
        return feeds

    def infer(self, request: Feeds) -> dict[str, np.ndarray]:
        """The outputs of one batch, by name."""
        with self.lock:
            return self.engine.run(request)

    call = infer

    def wait_until_idle(self) -> None:
        """Wait until no thread of this process computes."""
        timing.wait_until_idle()


def load_engine(path: Path, scratch: Path, threads: int | None = None, kernel: Path | None = None) -> LocalEngine:
    """Build an ONNX file for ONNX Runtime on this machine and load it, or load an engine of another runtime.

    Args:
        path: ONNX file, loaded as it is if it is quantized or was built for ONNX Runtime (`engine.onnx`); engine of a
            target; or output folder of a run, whose report names the engine.
        scratch: empty folder for what is built.
        threads: threads per call; None: one per core.
        kernel: library that computes block-sparse attention; None: the function in the graph.

    Raises:
        InputError: the file is missing or cannot be loaded.
        UsageError: a kernel for an engine of another runtime.
        TargetMissingError: the runtime is not installed.
    """
    if (path / reports.JSON_NAME).is_file():
        path = path / (reports.load(path).compressed.file or "model.onnx")
    if not path.is_file():
        problem = "is a folder without a report" if path.is_dir() else "no such file"
        raise InputError(
            f"{path}: {problem}; give an ONNX file or an engine, or the name of a model with --server",
            code=ErrorCode.FILE_MISSING,
            path=path,
        )
    with library_errors(path):
        runtime = target_of(path)
        if runtime.metadata_file is not None:
            loaded = _load_built(runtime, path, scratch, threads, kernel)
        else:
            loaded = _build(runtime, path, scratch, threads, kernel)
    _log.debug("loaded %s: %s", path, loaded.host)
    return loaded


def _load_built(runtime: Target, path: Path, scratch: Path, threads: int | None, kernel: Path | None) -> LocalEngine:
    """An engine that was built ahead of time."""
    if kernel is not None:
        raise UsageError(
            f"--kernel {kernel}: a kernel is for ONNX Runtime, and {path} is a {runtime.title} engine; omit it",
            code=ErrorCode.CONTRADICTION,
            field="kernel",
            path=path,
        )
    engine = runtime.load(path, threads=threads)
    graph = path.with_name(runtime.quantized_graph(engine.precision) or "model.onnx")
    graph = graph if graph.is_file() else path.with_name("model.onnx")
    if engine.quantized is not None and graph.is_file():
        graph = write_mixed(graph, engine.quantized.float_widths, scratch / f"mixed-{graph.name}")
    return _local(path, engine, engine.precision, graph, runtime)


def _build(runtime: Target, path: Path, scratch: Path, threads: int | None, kernel: Path | None) -> LocalEngine:
    """An engine that is built here from an ONNX file."""
    model = load(path)
    if is_quantized(model) or path.name == runtime.engine_file:  # fusion is for graphs of float operators
        engine = runtime.load(path, threads=threads, kernel=kernel)
        return _local(path, engine, engine.precision, path, runtime)
    half = any(value.dtype == ir.DataType.FLOAT16 for value in model.graph.initializers.values())
    out = scratch / runtime.engine_file
    engine = runtime.build(path, out, threads=threads, options=BuildOptions(kernel=kernel))
    return _local(path, engine, "fp16" if half else "fp32", path, runtime)


def _local(path: Path, engine: Engine, precision: Precision, graph: Path, runtime: Target) -> LocalEngine:
    lock = contextlib.nullcontext() if engine.is_reentrant else threading.Lock()
    tolerance = runtime.tolerance[precision]
    return LocalEngine(str(path), engine, engine.specs, precision, engine.host, graph, tolerance, lock)


@contextlib.contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Raise InputError in place of whatever a library raises while it works on a file.

    A damaged file that still parses can make any library below (onnx_ir, NumPy, ONNX Runtime's optimizers) raise an
    exception of any type, far from where the file is read. Some print it too, which would mix with results on stdout.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except (CompressorError, GraphPassError, MemoryError):
        raise
    except Exception as error:
        raise InputError(
            f"{path}: the file cannot be used ({type(error).__name__}: {one_line(error)}); export or copy it again",
            code=ErrorCode.FILE_UNREADABLE,
            path=path,
        ) from error
