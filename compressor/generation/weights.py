"""Engines of decoders with weights of 8 or 4 bits: round them, prove and score the engines, and choose one.

Decoding is bound by reading weights, so fewer bits make a token faster. Encoders read whole texts at once, which is
bound by arithmetic: they stay in floats.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir

import graph_passes
from compressor.engines.prove import Case
from compressor.engines.score import EvaluationScorer
from compressor.engines.trials import smallest_that_holds
from compressor.errors import CompressorError, ErrorCode, InputError, MismatchError, TargetMissingError
from compressor.generation.prove import prove_steps
from compressor.generation.steps import LOGITS, begin, decoded_ids, run_in_steps, step
from compressor.generation.workload import CachedEngine, Call, Workload
from compressor.measure.timing import alternate_calls
from compressor.progress import ProgressCallback, RunLog
from compressor.results import Candidate, Note, NoteCode, Proof, ProofStage, loss_of, size_label
from compressor.targets import Target, cached_target
from compressor.targets.base import TOLERANCE, WEIGHT_BITS, Feeds, WeightPrecision
from compressor.targets.caches import DECODER, FINER, WEIGHTS, Sessions
from compressor.targets.onnxruntime.sessions import OrtSessions
from compressor.targets.relative_error import Outputs
from compressor.tasks.calibration import calibration_rows, draw_rows, within_tokens
from graph_passes.passes import FoldWeights, QuantizeWeights, ReturnToFloats
from graph_passes.passes.quantize_weights import OPERATOR, matrix_of, weights_of
from graph_passes.quantizers.weight_blocks import BLOCKS, floats_of_blocks, round_blocks

_FINER: Mapping[WeightPrecision, str] = {"int4w": "int8w", "int8w": "floats"}
"""The finer precision of weights that lose too much in a precision."""
_RANKED_ROWS, _RANKED_TOKENS = 4, 256
"""Maximum numbers of training examples, and of their tokens, on which matmuls are ranked."""
_TIMED_SECONDS = 3.0
"""Maximum time spent on timing one candidate at one size."""
_SWITCH = "switch:"
"""Beginning of the names of the factors that `_switchable` adds."""


def require_rounded(runtime: Target) -> None:
    """Check that a runtime multiplies by weights of few bits on this machine.

    Raises:
        TargetMissingError: the runtime does not.
    """
    ends = [ir.val(name, ir.DataType.FLOAT, (1, width)) for name, width in (("x", BLOCKS[0]), ("y", 2))]
    weights = ir.val("w", const_value=ir.tensor(np.ones((BLOCKS[0], 2), np.float32), name="w"))
    product = ir.node("MatMul", [ends[0], weights], outputs=[ends[1]], name="product")
    graph = ir.Graph(
        ends[:1], ends[1:], nodes=[product], initializers=[weights], opset_imports={"": 18}, name="product"
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "product.onnx"
            graph_passes.save(QuantizeWeights(4)(ir.Model(graph, ir_version=10)).model, path)
            runtime.check_rounded(path)
    except InputError as error:
        text = (
            f"weights of few bits: the installed {runtime.title} has no matmuls with them on this machine ({error});"
            f" install the package {runtime.packages[0]}, or use --precision fp32"
        )
        raise TargetMissingError(text, code=ErrorCode.UNSUPPORTED, field="precision") from error


@dataclass(frozen=True)
class Rounding:
    """How the weights of a decoder are stored.

    Attributes:
        precision: the precision of all weights but `finer`; None: floats.
        finer: names of the weights in the next finer precision: 8 bits instead of 4, floats instead of 8.
    """

    precision: WeightPrecision | None = None
    finer: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The precision with its exceptions, as of `Sessions.precision`."""
        return ", ".join(filter(None, (self.precision or "fp32", self.form)))

    @property
    def form(self) -> str:
        """The exceptions, in words."""
        if self.precision is None or not self.finer:
            return ""
        return f"{len(self.finer)} matmul{'s' if len(self.finer) > 1 else ''} in {_FINER[self.precision]}"

    @classmethod
    def of(cls, sessions: Sessions) -> Rounding:
        """The rounding of an engine that is loaded."""
        precision = next((name for name in WEIGHT_BITS if sessions.precision.startswith(name)), None)
        return cls(precision, sessions.finer)

    def row(self, runtime: Target) -> Candidate:
        """The row of a table of candidates, without measurements."""
        return Candidate(target=runtime.name, precision=self.precision or "fp32", form=self.form, in_float=self.finer)

    def apply(self, model: ir.Model) -> ir.Model:
        """Round the weights of a graph, which is edited in place.

        Raises:
            InputError: no weights can be rounded.
        """
        if self.precision is None:
            return model
        bits, finer = WEIGHT_BITS[self.precision], 8 if self.precision == "int4w" else None
        report = QuantizeWeights(bits, dict.fromkeys(self.finer, finer))(model).report
        if not report.bits:
            reasons = "; ".join(map(str, report.refused)) or "the graph has no matmul with constant weights"
            text = f"{DECODER}: no weights can be rounded to {bits} bits ({reasons}); use --precision fp32"
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, precision=self.precision)
        missing = set(self.finer).difference(report.bits if finer else model.graph.initializers)
        assert not missing, missing  # fusions keep the names of weights
        model.metadata_props[WEIGHTS] = self.label
        model.metadata_props[FINER] = json.dumps(self.finer)
        return model


def reference_sessions(folder: Path) -> OrtSessions:
    """The graphs of a folder without optimizations, with rounded weights where its engine has them: the reference of
    the engine.

    Raises:
        InputError: the folder has no graphs that generate, or they cannot be loaded.
    """
    rounding = Rounding.of(cached_target(folder).open_sessions(folder, provider="cpu"))
    if rounding.precision is None:
        return OrtSessions(folder, optimized=False)
    with tempfile.TemporaryDirectory() as scratch:
        return _reference(folder, rounding, Path(scratch) / DECODER)


def _reference(folder: Path, rounding: Rounding, path: Path) -> OrtSessions:
    """The graphs of a folder as they are, with the rounded weights of the decoder in floats; written to `path`."""
    model = rounding.apply(graph_passes.load(folder / DECODER))
    names = {node: str(node.name) for node in model.graph if node.op_type == OPERATOR}
    assert all(names.values()), "a matmul has no name, so it would be compared with itself"
    graph_passes.save(ReturnToFloats(names.values())(model).model, path)
    return OrtSessions(folder, optimized=False, decoder=path)


def build_rounded(
    folder: Path, runtime: Target, rounding: Rounding, texts: Sequence[Case], threads: int | None, out: Path
) -> tuple[Sessions, Proof]:
    """Build the engine of a decoder with rounded weights, and prove that it computes what the graph with them does.

    Kernels round activations to 8 bits, up or down, and later layers amplify the difference: the tolerance is that of
    engines in int8.

    Args:
        folder: the folder of the graphs, with their engines in fp32.
        out: an empty folder for the engine.

    Returns:
        The sessions of the folder with that decoder, and the proof.

    Raises:
        InputError: no weights can be rounded, or the runtime cannot multiply by them.
        MismatchError: the proof does not hold.
    """
    path = runtime.round_weights(folder, rounding.apply, out)
    sessions = runtime.open_sessions(folder, provider="cpu", threads=threads, decoder=path)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        reference = _reference(folder, rounding, Path(scratch) / DECODER)
    expected = [run_in_steps(reference, text.feeds) for text in texts]
    stage, tolerance = ProofStage.CACHED_WEIGHTS, TOLERANCE["int8"]
    return sessions, prove_steps(stage, "compressed", texts, expected, sessions, tolerance)


def round_engine(folder: Path, runtime: Target, precision: WeightPrecision) -> None:
    """Replace the engine of a folder's decoder by an engine with rounded weights, to time it; nothing is proven.

    Args:
        folder: the folder of the graphs, with their engines in fp32.
        precision: the precision of all weights.

    Raises:
        InputError: no weights can be rounded, or the runtime cannot multiply by them.
    """
    with tempfile.TemporaryDirectory(dir=folder) as out:
        runtime.round_weights(folder, Rounding(precision).apply, Path(out))
        move_engines(runtime, Path(out), folder)


@dataclass(frozen=True)
class Trial:
    """A candidate for the engine of the decoder.

    Attributes:
        rounding: how its weights are stored.
        candidate: its row of the table.
        engine: its file; None: it could not be built, proven or scored.
        error: why there is no engine.
    """

    rounding: Rounding
    candidate: Candidate
    engine: Path | None = None
    error: CompressorError | None = None


@dataclass(frozen=True)
class WeightTrials:
    """Everything needed to build, prove, score and time engines of a decoder with rounded weights.

    Attributes:
        folder: the folder of the graphs, with their engines in fp32.
        runtime: the target of the engines.
        texts: inputs of the proofs.
        scorer: scores engines on the evaluation rows, in comparison with the dense engine.
        workload: the requests whose tokens are timed.
        threads: threads of the engines; None: one per core.
        seconds: maximum time spent on timing one candidate at one size.
        scratch: an empty folder for engines that are not delivered.
        log: receives stages and notes.
    """

    folder: Path
    runtime: Target
    texts: Sequence[Case]
    scorer: EvaluationScorer
    workload: Workload
    threads: int | None
    seconds: float
    scratch: Path
    log: RunLog
    _numbers: itertools.count[int] = field(default_factory=itertools.count, repr=False)

    def choose(self, precisions: Sequence[WeightPrecision | None]) -> tuple[Candidate, ...]:
        """Try precisions of the weights, and deliver the fastest engine that keeps the metric.

        Where a precision loses more than `--max-drop`, as few matmuls as keep the metric get a finer precision: the
        matmuls whose rounding changes the logits most.

        Args:
            precisions: the precisions; None: floats.

        Returns:
            Every candidate. The chosen one is the engine of the folder's decoder.

        Raises:
            CompressorError: no engine can be built and proven.
        """
        trials = []
        for precision in precisions:
            trials.append(self._try(Rounding(precision)))
            if precision is not None and trials[-1].engine is not None and not trials[-1].candidate.holds:
                trials.append(self._with_finer(trials[-1]))
        if not any(trial.engine for trial in trials):
            raise next(trial.error for trial in trials if trial.error is not None)
        trials = self._timed(trials) if len(trials) > 1 else trials
        chosen = self._best(trials)
        if chosen.rounding.precision is not None:
            assert chosen.engine is not None
            move_engines(self.runtime, chosen.engine.parent, self.folder)
        self.log.add_notes(self._notes(chosen))
        return tuple(trial.candidate.model_copy(update={"chosen": trial is chosen}) for trial in trials)

    def _try(self, rounding: Rounding) -> Trial:
        """Make, prove and score one candidate; a failure is recorded in its row."""
        row, proofs = rounding.row(self.runtime), list[Proof]()
        try:
            with self.log.stage(f"trying {row.label}, with caches"):
                if rounding.precision is None:
                    opened = self._open()
                else:
                    out = self.scratch / f"decoder{next(self._numbers)}"
                    out.mkdir()
                    parts = self.folder, self.runtime, rounding, self.texts, self.threads, out
                    opened, *proofs = build_rounded(*parts)
            whole = dataclasses.replace(self.scorer.dense, engine=CachedEngine.of(opened))
            scored = self.scorer.measure(whole, f"{row.label}, with caches")
        except CompressorError as error:
            return Trial(rounding, row.model_copy(update={"failure": str(error), "holds": False}), error=error)
        update = {**self.scorer.compare(scored), "proofs": tuple(proofs), "file_bytes": self._bytes(opened.path)}
        return Trial(rounding, row.model_copy(update=update), opened.path)

    def _open(self, decoder: Path | None = None) -> Sessions:
        return self.runtime.open_sessions(self.folder, provider="cpu", threads=self.threads, decoder=decoder)

    def _bytes(self, engine: Path) -> int:
        """Bytes of the engines of the folder, with another one of the decoder."""
        folders = self.folder, engine.parent
        files = {file.name: file for folder in folders for file in self.runtime.session_files(folder)}
        return sum(file.stat().st_size for file in files.values())

    def _with_finer(self, trial: Trial) -> Trial:
        """The candidate with as few matmuls in a finer precision as keep the metric."""
        precision = trial.rounding.precision
        assert precision is not None

        def attempt(count: int) -> Trial:
            return self._try(Rounding(precision, ranked[:count]))

        try:
            ranked = self._ranked(precision)
            most = len(ranked) - 1  # with all of them it would be the finer precision
            best = smallest_that_holds(most, attempt, lambda attempted: attempted.candidate.holds)
            if best is not None:
                return best
            text = "the metric drops too much, however many matmuls have a finer precision"
            raise MismatchError(text, code=ErrorCode.NUMBERS_DIFFER)
        except CompressorError as error:
            row = trial.rounding.row(self.runtime).model_copy(
                update={"form": "mixed", "failure": str(error), "holds": False}
            )
            return Trial(trial.rounding, row, error=error)

    def _ranked(self, precision: WeightPrecision) -> tuple[str, ...]:
        """Names of the weights of the decoder, those whose rounding changes the logits most first."""
        bits, scratch = WEIGHT_BITS[precision], self.scratch / "ranked.onnx"
        with self.log.stage("ranking the matmuls") as on_progress:
            return rank_weights(self.folder, bits, self._ranking_texts(), scratch, on_progress)

    def _ranking_texts(self) -> list[Feeds]:
        """Training rows, if there are any; else the inputs of the proofs."""
        data = self.scorer.data
        if data is None or not len(data.train):
            return [text.feeds for text in self.texts]
        count = len(within_tokens(data, draw_rows(data, _RANKED_ROWS, self.scorer.seed), _RANKED_TOKENS))
        return calibration_rows(data, count, self.scorer.seed)

    def _timed(self, trials: Sequence[Trial]) -> list[Trial]:
        """The candidates with the time of a token by size, and their speed against the engine in fp32."""
        dense = self._open()
        texts = self.workload.feeds(self.folder, dense.vocabulary)
        timed = []
        for trial in trials:
            if trial.engine is None:
                timed.append(trial)
                continue
            sessions, milliseconds, ratios = self._open(trial.engine), {}, []
            for size, feeds in texts.items():
                if size.phase != "token":
                    continue
                label = size_label(*size)
                with self.log.stage(f"timing weights in {trial.candidate.label}, {label}") as on_progress:
                    calls = [Call(each, feeds) for each in (dense, sessions)]
                    seconds = 2 * min(_TIMED_SECONDS, self.seconds)
                    pairs = list(alternate_calls(calls[0], calls[1], seconds, on_progress=on_progress))
                medians = 1e3 * np.median(np.stack(pairs, axis=1), axis=(1, 2))
                milliseconds[label] = float(medians[1])
                ratios.append(medians[0] / medians[1])
            update = {"milliseconds": milliseconds, "speed": float(np.exp(np.mean(np.log(ratios))))}
            timed.append(dataclasses.replace(trial, candidate=trial.candidate.model_copy(update=update)))
        return timed

    def _best(self, trials: Sequence[Trial]) -> Trial:
        """The fastest candidate that keeps the metric; the one that loses least where none does."""
        built = [trial for trial in trials if trial.engine is not None]
        holding = [trial for trial in built if trial.candidate.holds]
        if holding:
            return max(holding, key=lambda trial: trial.candidate.speed or 0.0)
        assert self.scorer.data is not None
        higher_is_better = self.scorer.data.task.higher_is_better
        return min(
            built, key=lambda trial: loss_of(trial.candidate.difference or 0.0, higher_is_better=higher_is_better)
        )

    def _notes(self, chosen: Trial) -> list[Note]:
        """What a reader must know about the choice."""
        row, notes = chosen.candidate, list[Note]()
        if chosen.rounding.precision is None:
            return notes
        change = (
            "" if row.difference is None else f"; the metric changes by {row.difference:+.4g} on the evaluation rows"
        )
        if self.scorer.max_drop is None:
            text = f"{row.label}: the loss through rounded weights has no bound (set one with --max-drop){change}"
            notes.append(Note(code=NoteCode.LOSS_UNBOUNDED, text=text))
        elif not row.holds:
            text = f"no engine with caches keeps the metric within --max-drop; {row.label} loses least{change}"
            notes.append(Note(code=NoteCode.ENGINE_CHOSEN, text=text))
        if row.in_float:
            names = ", ".join(row.in_float)
            text = f"{row.label}: these matmuls need a finer precision to keep the metric: {names}"
            notes.append(Note(code=NoteCode.PRODUCTS_IN_FLOAT, text=text))
        return notes


def move_engines(runtime: Target, source: Path, folder: Path) -> None:
    """Move the engines with caches of one folder to another; they replace files of the same names."""
    for file in runtime.session_files(source):
        file.replace(folder / file.name)


def rank_weights(
    folder: Path, bits: int, texts: Sequence[Feeds], scratch: Path, on_progress: ProgressCallback | None = None
) -> tuple[str, ...]:
    """Names of the weights of a decoder's matmuls, sorted by how much rounding each alone changes the logits.

    Args:
        bits: bits of the weights, 4 or 8.
        scratch: a file for a graph that is twice as large.
        on_progress: called with (matrices tried, matrices).
    """
    model = graph_passes.load(folder / DECODER)
    switches = _switchable(model, bits)
    graph_passes.save(model, scratch)
    sessions = OrtSessions(folder, optimized=False, decoder=scratch)

    def logits() -> list[Outputs]:
        return [
            {LOGITS: step(sessions, feeds, 0, decoded_ids(feeds).shape[1], begin(sessions, feeds))[0]}
            for feeds in texts
        ]

    expected, distances = logits(), dict[str, float]()
    for number, (name, switch) in enumerate(switches.items(), start=1):
        sessions.constants = {switch: np.ones((), np.float32)}
        pairs = zip(expected, logits(), strict=True)
        distances[name] = sum(float(np.square(a[LOGITS] - b[LOGITS]).sum()) for a, b in pairs)
        if on_progress is not None:
            on_progress(number, len(switches))
    return tuple(sorted(distances, key=lambda name: -distances[name]))


def _switchable(model: ir.Model, bits: int) -> dict[str, str]:
    """Add to each matmul with constant weights the error of its rounded weights, times a constant that is zero.

    Returns the name of the constant, which a caller may replace, for the name of the weights.
    """
    FoldWeights()(model)
    graph, switches = model.graph, dict[str, str]()
    rounded = QuantizeWeights(bits)(model.clone()).report.bits
    for number, node in enumerate(list(graph)):
        weights, output = weights_of(node), node.outputs[0]
        name = "" if weights is None else str(weights.name)
        if name not in rounded:
            continue
        if name not in switches:
            switches[name] = f"{_SWITCH}{name}"
            graph.inputs.append(_constant(graph, switches[name], np.zeros((), np.float32)))
        exact, readers = matrix_of(node), list(output.uses())
        error = floats_of_blocks(*round_blocks(exact, bits), bits, len(exact)) - exact
        product = ir.node("MatMul", [node.inputs[0], _constant(graph, f"{_SWITCH}{number}", error)])
        scaled = ir.node("Mul", [product.outputs[0], graph.initializers[switches[name]]])
        total = ir.node("Add", [output, scaled.outputs[0]])
        graph.insert_after(node, [product, scaled, total])
        total.outputs[0].type, total.outputs[0].shape = output.type, output.shape
        if output.is_graph_output():
            total.outputs[0].name, output.name = output.name, f"{output.name}.exact"
            graph.outputs[graph.outputs.index(output)] = total.outputs[0]
        for reader, position in readers:
            reader.replace_input_with(position, total.outputs[0])
    return switches


def _constant(graph: ir.Graph, name: str, content: np.ndarray) -> ir.Value:
    value = ir.val(name, const_value=ir.tensor(content, name=name))
    graph.register_initializer(value)
    return value
