"""An engine on this machine that a check calls: an ONNX file in ONNX Runtime, or an engine built ahead of time.

Proofs of an engine in less than fp32 are run again if it was proven with other instructions or another runtime version.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor import report as reports
from compressor.environment import INSTRUCTIONS, machine
from compressor.errors import CompressorError, ErrorCode, InputError, UsageError
from compressor.measure import timing
from compressor.progress import Listener
from compressor.results import Note, NoteCode, Proof, ProofStage, Report
from compressor.silence_libraries import one_line
from compressor.targets import QUANTIZED, BuildOptions, Engine, Target, target, target_of
from compressor.targets.base import Feeds, Precision
from compressor.targets.graph_facts import is_quantized, write_mixed
from compressor.targets.trial_inputs import has_random_inputs, id_limits, trial_feeds
from graph_passes import load
from graph_passes.errors import GraphPassError

_log = logging.getLogger(__name__)


class LocalEngine:
    """An engine that is loaded in this process; see `compressor.latency.endpoints.Endpoint`.

    Args:
        graph: ONNX file of the function that it computes.
        precision: numeric precision of its outputs; None: that of the engine.

    Attributes:
        tolerance: largest relative error against the graph.
    """

    concurrency = 4

    def __init__(
        self, path: Path, engine: Engine, graph: Path, runtime: Target, precision: Precision | None = None
    ) -> None:
        self.name, self.engine, self.graph = str(path), engine, graph
        self.inputs, self.host = engine.specs, engine.host
        self.precision: Precision = precision or engine.precision
        self.tolerance = runtime.tolerance[self.precision]
        # Only an engine with a single execution context has to be locked during a call.
        self._lock: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext() if engine.is_reentrant else threading.Lock()
        )

    @cached_property
    def _model(self) -> ir.Model:
        """The graph; raises InputError where the folder of the engine lacks it."""
        if not self.graph.is_file():
            text = (
                f"{self.name}: its folder lacks {self.graph.name}, the graph of the engine, which random inputs need;"
                " copy the graph there, or give inputs (--inputs)"
            )
            raise InputError(text, code=ErrorCode.FILE_MISSING, path=self.graph, field="inputs")
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

    def fitting_length(self, batch: int, longest: int) -> int:
        """`longest`, or the first of its half, its quarter and so on that the engine runs with; `longest` if none."""
        for shift in range(longest.bit_length()):
            with contextlib.suppress(InputError):
                self.infer(self.trial_batch(batch, longest >> shift, 0))
                return longest >> shift
        return longest

    def encode(self, feeds: Feeds) -> Feeds:
        """The batch itself."""
        return feeds

    def infer(self, request: Feeds) -> dict[str, np.ndarray]:
        """The outputs of one batch, by name."""
        with self._lock:
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
        text = f"{problem}; give an ONNX file or an engine, or the name of a model with --server"
        raise InputError.of_file(path, text, ErrorCode.FILE_MISSING)
    with library_errors(path):
        runtime = target_of(path)
        if runtime.metadata_file is not None:
            loaded = _load_built(runtime, path, scratch, threads, kernel)
        else:
            loaded = _build(runtime, path, scratch, threads, kernel)
    _log.debug("loaded %s: %s", path, loaded.host)
    return loaded


def _load_built(runtime: Target, path: Path, scratch: Path, threads: int | None, kernel: Path | None) -> LocalEngine:
    if kernel is not None:
        raise UsageError(
            f"--kernel {kernel}: a kernel is for ONNX Runtime, and {path} is a {runtime.title} engine; omit --kernel",
            code=ErrorCode.CONTRADICTION,
            field="kernel",
            path=path,
        )
    engine = runtime.load(path, threads=threads)
    graph = path.with_name(runtime.quantized_graph(engine.precision) or "model.onnx")
    graph = graph if graph.is_file() else path.with_name("model.onnx")
    if engine.quantized is not None and graph.is_file():
        graph = write_mixed(graph, engine.quantized.float_widths, scratch / f"mixed-{graph.name}")
    return LocalEngine(path, engine, graph, runtime)


def _build(runtime: Target, path: Path, scratch: Path, threads: int | None, kernel: Path | None) -> LocalEngine:
    model = load(path)
    if is_quantized(model) or path.name == runtime.engine_file:  # fusion is for graphs of float operators
        engine = runtime.load(path, threads=threads, kernel=kernel)
        return LocalEngine(path, engine, path, runtime)
    half = any(value.dtype == ir.DataType.FLOAT16 for value in model.graph.initializers.values())
    out = scratch / runtime.engine_file
    engine = runtime.build(path, out, threads=threads, options=BuildOptions(kernel=kernel))
    return LocalEngine(path, engine, path, runtime, "fp16" if half else "fp32")


@contextlib.contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Raise InputError in place of any exception of a library that works on a file.

    With a damaged file that still parses, the libraries below (onnx_ir, NumPy, ONNX Runtime's optimizers) raise
    exceptions of any type long after it is read, and print some of them, which would mix with results on stdout.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except (CompressorError, GraphPassError, MemoryError):
        raise
    except Exception as error:
        text = f"the file cannot be used ({type(error).__name__}: {one_line(error)}); export or copy it again"
        raise InputError.of_file(path, text, ErrorCode.FILE_UNREADABLE) from error


def prove_again(engine: LocalEngine, listener: Listener) -> tuple[Proof, ...]:
    """Run the proofs of a run's engine in 8 bits or bfloat16 again, if this machine differs from that of the run.

    Args:
        engine: an engine, which has proofs if it is in the folder of the run that built it.

    Returns:
        The proofs, which hold; empty where nothing differs, and for engines in fp32 or fp16.

    Raises:
        MismatchError: the engine computes something else on this machine.
    """
    report = _report_of(Path(engine.name))
    changes = [] if report is None else list(changes_since(report, machine(), engine.engine.session))
    if report is None or not changes:
        return ()
    proofs: tuple[Proof, ...] = ()
    outcome = "only its outputs are compared with those of its graph"
    if engine.precision in QUANTIZED or report.compressed.reduced_products:
        try:
            with listener.stage(f"proving the {engine.precision} engine on this machine"):
                proofs = _prove(engine, report)
            outcome = f"its {engine.precision} proofs hold on this machine too"
        except InputError as error:
            outcome = f"its {engine.precision} proofs cannot be run again on this machine: {error}"
    text = f"{engine.name} was proven on another machine ({'; '.join(changes)}); {outcome}"
    listener.note(Note(code=NoteCode.PROVEN_ELSEWHERE, text=text))
    return proofs


def changes_since(report: Report, present: Mapping[str, str], session: Mapping[str, Any]) -> Iterator[str]:
    """The differences between the machine of a report and the present machine, in a few words each.

    Args:
        present: facts about this machine, as in `Report.machine`.
        session: runtime and options of the engine on this machine.
    """
    pairs = {
        "runtime": (report.session.get("runtime"), session.get("runtime")),
        "inference_precision": (report.session.get("inference_precision"), session.get("inference_precision")),
    }
    if "CPU" in str(session.get("provider")):
        pairs |= {name: (report.machine.get(name), present.get(name)) for name in INSTRUCTIONS}
    for name, (before, now) in pairs.items():
        if before is not None and before != now:
            yield f"{name}: {before} there, {now} here"


def _report_of(path: Path) -> Report | None:
    """The report of the run that built an engine; None where the file is not the engine of a run."""
    if not (path.parent / reports.JSON_NAME).is_file():
        return None
    report = reports.load(path.parent)
    return report if report.compressed.file == path.name else None


def _prove(engine: LocalEngine, report: Report) -> tuple[Proof, ...]:
    """Run the proofs of an engine in 8 bits or bfloat16, which this machine may compute in fp32."""
    # Imported here: checks that prove nothing, and the processes of scenarios, do not wait for them.
    from compressor.engines.build import prove_build, require_precision
    from compressor.run.rebuild import load_run

    path = Path(engine.name)
    run = load_run(path.parent, {})
    stages = {proof.stage for proof in report.proofs if proof.variant == "compressed"}
    config = run.recipe.engine
    file = target(config.target).quantized_graph(config.definite_precision)
    quantized = path.with_name(file) if file is not None and ProofStage.PRODUCTS in stages else None
    require_precision(engine.engine, config)
    graph = run.graphs["compressed"]
    matmuls = engine.engine.quantized
    options = BuildOptions(float_widths=frozenset(() if matmuls is None else matmuls.float_widths))
    return prove_build(engine.engine, graph, config, options, run.cases, "compressed", quantized=quantized)
