"""Candidates for the engine of the compressed model: built, proven and scored."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import graph_passes
from compressor.config.sections import EngineConfig
from compressor.engines.build import ShrunkGraph, Variant, build_variant
from compressor.engines.choices import Choice
from compressor.engines.matmul_times import MatmulTimes
from compressor.engines.prove import Case
from compressor.engines.quantize import quantize_as, quantize_portable, remove_graph
from compressor.engines.score import EvaluationScorer, ScoredAnswers
from compressor.errors import CompressorError, ErrorCode, InputError, MismatchError, TargetMissingError
from compressor.measure import file_bytes
from compressor.progress import RunLog, tracked
from compressor.quantization import QuantizedGraph, rank_matmuls
from compressor.quantization.matmuls import matmul_names
from compressor.results import Candidate, ProofStage, Size
from compressor.targets import BuildOptions, Feeds, target
from compressor.tasks.calibration import calibration_rows
from compressor.workdir import QUANTIZED_GRAPH
from graph_passes import GraphPassError
from graph_passes.passes import ReturnToFloats

T = TypeVar("T")

_RANKED_ROWS = 32
"""Calibration rows on which matmuls are ranked."""


@dataclass(frozen=True)
class Trial:
    """A candidate, with its engine if it could be built.

    Attributes:
        choice: its settings.
        candidate: its row of the table.
        variant: its engine; None: there is none.
        source: the quantized graph that it was built from; None: the shrunk graph.
        options: the options that it was built with; None: those of all engines of the run.
        scored: its answers to the evaluation rows; None: it was not built, or they have no labels.
        error: why it cannot be delivered; None: it can be, or it loses too much of the metric.
    """

    choice: Choice
    candidate: Candidate
    variant: Variant | None = None
    source: Path | None = None
    options: BuildOptions | None = None
    scored: ScoredAnswers | None = None
    error: Exception | None = None

    def failed(self, error: Exception) -> Trial:
        """The candidate without an engine, as a row with the reason."""
        candidate = self.candidate.model_copy(update={"failure": str(error), "holds": False})
        return dataclasses.replace(self, candidate=candidate, variant=None, error=error)


@dataclass(frozen=True)
class EngineTrials:
    """Everything needed to build, score and time candidates.

    Attributes:
        graph: the graph of the compressed variant.
        scorer: scores candidates, in comparison with the dense engine.
        config: the targets and precisions that may be chosen, and the number of calibration rows.
        options: sizes and settings of the engines.
        cases: inputs of the proofs.
        inputs: inputs to time, by batch size and length.
        seconds: maximum time spent on timing one candidate at one size.
        matmul_times: times of single matmuls, by which engines mix int8 and floats.
        scratch: folder for engines that are not delivered.
        log: receives stages and notes.
        deadline: time by `time.perf_counter` after which no further candidate is tried, once one keeps the metric.
    """

    graph: ShrunkGraph
    scorer: EvaluationScorer
    config: EngineConfig
    options: BuildOptions
    cases: Sequence[Case]
    inputs: Mapping[Size, Feeds]
    seconds: float
    matmul_times: MatmulTimes
    scratch: Path
    log: RunLog
    deadline: float = math.inf
    _numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)
    _ranked: dict[Path, list[str]] = field(default_factory=dict, repr=False)
    _unquantized: dict[str, Exception] = field(default_factory=dict, repr=False)

    @property
    def has_rows(self) -> bool:
        """Whether there are training rows, on which engines in 8 bits are calibrated."""
        return self.scorer.data is not None and len(self.scorer.data.train) > 0

    @functools.cached_property
    def _rows(self) -> list[Feeds]:
        assert self.scorer.data is not None
        return calibration_rows(self.scorer.data, self.config.calibration_rows, self.scorer.seed)

    @property
    def is_late(self) -> bool:
        """Whether the time for candidates is over."""
        return time.perf_counter() > self.deadline

    def quantize(self, choices: Sequence[Choice]) -> dict[str | None, QuantizedGraph]:
        """The quantized graphs that engines are built from, beside the float graph, by file name.

        A graph that cannot be made is left out; the engines that need it become rows with the reason.

        Args:
            choices: the engines; those of missing runtimes need no graph.
        """
        graphs: dict[str | None, QuantizedGraph] = {}
        available = [choice for choice in choices if target(choice.config.target).missing() is None]
        for file in dict.fromkeys(choice.quantized_graph for choice in available):
            if file is None or self.scorer.data is None:
                continue
            with self.log.stage("compressed: quantizing the graph") as on_progress:
                try:
                    graphs[file] = quantize_as(file, self.graph.path, self._rows, on_progress)
                except (CompressorError, GraphPassError) as error:
                    self._unquantized[file] = error
                    remove_graph(self.graph.path.with_name(file))
        return graphs

    def build(self, choice: Choice, quantized: QuantizedGraph | None) -> Trial:
        """Build and prove one candidate; a failure is recorded in its row.

        Matmuls that fail their proof return to floats, and the candidate is built again.

        Args:
            quantized: the quantized graph of its form; None: there is none.
        """
        reason = target(choice.config.target).missing()
        if reason is not None:
            return Trial(choice, choice.row).failed(TargetMissingError(reason, code=ErrorCode.UNSUPPORTED))
        if choice.quantized_graph is not None and quantized is None:
            reasons = self._unquantized
            missing = InputError("there are no rows to quantize the graph with", code=ErrorCode.TOO_FEW_ROWS)
            return Trial(choice, choice.row).failed(reasons.get(choice.quantized_graph, missing))
        return self._build(choice, None if quantized is None else quantized.path)

    def _build(self, choice: Choice, source: Path | None) -> Trial:
        folder = self.scratch / f"candidate{next(self._numbers)}"
        folder.mkdir()
        config, options = choice.config, self.options
        try:
            if choice.mixes:
                config, options = self.matmul_times.mixed(choice, source or self.graph.path, options)
            if config.precision != choice.config.precision:
                raise InputError("no matmul is faster in int8 on this machine", code=ErrorCode.UNSUPPORTED)
            with self.log.stage(f"trying {choice.label}"):
                variant = build_variant(self.graph, choice.config, options, self.cases, quantized=source, folder=folder)
        except (CompressorError, GraphPassError) as error:
            failing = self._failing_products(source, error)
            if not failing or source is None:
                return Trial(choice, choice.row).failed(error)
            return self._build(*self._in_floats(choice, source, failing))
        facts = {
            "file_bytes": file_bytes(variant.engine, self.graph.path),
            "quantized": variant.engine.quantized,
            "proofs": variant.proofs,
        }
        return Trial(choice, choice.row.model_copy(update=facts), variant, source, options)

    def _failing_products(self, source: Path | None, error: Exception) -> tuple[str, ...]:
        """Names of the products of a quantized graph whose proof failed with an error; empty for any other error."""
        details = error.details if isinstance(error, CompressorError) else {}
        if source is None or details.get("stage") is not ProofStage.PRODUCTS:
            return ()
        return tuple(matmul_names(graph_passes.load(source), details.get("outputs", ())))

    def _in_floats(self, choice: Choice, source: Path, names: Sequence[str]) -> tuple[Choice, Path]:
        """The choice and the quantized graph with further matmuls in floats."""
        path = self.scratch / f"returned{next(self._numbers)}.onnx"
        graph_passes.save(ReturnToFloats(names)(graph_passes.load(source)).model, path)
        return dataclasses.replace(choice, in_float=(*choice.in_float, *names)), path

    def _quantized_without(self, trial: Trial, quantized: QuantizedGraph, names: Sequence[str]) -> tuple[Choice, Path]:
        """The choice and the quantized graph of a candidate with further matmuls in floats.

        In the portable graph, weights of products were smoothed and rounded, and biases corrected for it, so that the
        graph is quantized again without these products; otherwise they drop their quantizers.
        """
        choice = trial.choice
        if choice.quantized_graph != QUANTIZED_GRAPH:
            return self._in_floats(choice, trial.source or quantized.path, names)
        in_float = (*choice.in_float, *names)
        path = self.scratch / f"returned{next(self._numbers)}.onnx"
        with self.log.stage("compressed: quantizing the graph"):
            quantize_portable(self.graph.path, self._rows, path, keep_float={*quantized.ruined, *in_float})
        return dataclasses.replace(choice, in_float=in_float), path

    def score(self, trial: Trial) -> Trial:
        """The candidate with the metric and the equal answers on the evaluation rows, if there are any.

        An engine that cannot run on these rows is a row with the reason.
        """
        if trial.variant is None:
            return trial
        try:
            scored = self.scorer.measure(trial.variant, trial.choice.label)
        except CompressorError as error:
            return trial.failed(error)
        candidate = trial.candidate.model_copy(update=self.scorer.compare(scored))
        return dataclasses.replace(trial, candidate=candidate, scored=scored)

    def return_products(self, trial: Trial, quantized: QuantizedGraph) -> Trial:
        """A candidate of the same target with as few matmuls in floats as keep the metric.

        Matmuls are ranked by how much returning each alone changes the outputs; bisection finds the number.
        """
        further = Trial(trial.choice, trial.choice.row)

        def attempt(count: int) -> Trial:
            if self.is_late:
                raise no_time()
            return self.score(self._build(*self._quantized_without(trial, quantized, ranked[:count])))

        try:
            ranked = [name for name in self._ranking(quantized.path) if name not in trial.choice.in_float]
            # With every product in floats the engine would not be in int8.
            best = smallest_that_holds(len(ranked) - 1, attempt, lambda attempted: attempted.candidate.holds)
        except (CompressorError, GraphPassError) as error:
            return further.failed(error)
        none_holds = MismatchError("no number of matmuls in fp32 keeps the metric", code=ErrorCode.NUMBERS_DIFFER)
        return best or further.failed(none_holds)

    def _ranking(self, quantized: Path) -> list[str]:
        """The products of the quantized graph, in the order in which they return to floats."""
        if quantized not in self._ranked:
            with self.log.stage("compressed: ranking the matmuls") as on_progress:
                rows = self._rows[:_RANKED_ROWS]
                self._ranked[quantized] = rank_matmuls(quantized, self.graph.path, rows, on_progress)
        return self._ranked[quantized]

    def measure_memory(self, trials: Sequence[Trial]) -> list[Trial]:
        """The candidates; those that keep the metric have their peak memory at the first size."""
        feeds = next(iter(self.inputs.values()))
        with self.log.stage("measuring the memory of all engines") as on_progress:
            measured = []
            for trial in tracked(trials, on_progress):
                if trial.variant is not None and trial.candidate.holds:
                    peak = trial.variant.engine.memory(feeds)
                    update = {"peak_memory_bytes": peak}
                    trial = dataclasses.replace(trial, candidate=trial.candidate.model_copy(update=update))
                measured.append(trial)
        return measured


def no_time() -> InputError:
    """Why a candidate was not tried for lack of time."""
    return InputError("no time was left to try it; allow more time (--minutes)", code=ErrorCode.UNSUPPORTED)


def smallest_that_holds(maximum: int, attempt: Callable[[int], T], holds: Callable[[T], bool]) -> T | None:
    """The attempt with the smallest number that holds, by bisection; None if none holds.

    Args:
        maximum: largest number to attempt; the smallest is 1.
        holds: whether an attempt holds; with a larger number it is assumed to hold too.
    """
    best, low, high = None, 1, maximum + 1
    while low < high:
        count = (low + high) // 2
        attempted = attempt(count)
        if holds(attempted):
            best, high = attempted, count
        else:
            low = count + 1
    return best
