"""Try every engine that a recipe allows, and deliver the fastest that keeps the metric."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import graph_passes
from compressor.config.run import Recipe
from compressor.config.sections import AUTO, EngineConfig
from compressor.environment import int8_instructions
from compressor.errors import CompressorError, ErrorCode, TargetMissingError
from compressor.measure import file_bytes, median_times
from compressor.model_folder import ModelFolder, example_inputs
from compressor.quantization import QuantizedGraph, quantize_graph, rank_products
from compressor.results import Candidate, Note, NoteCode
from compressor.run.calibrate import calibration_rows
from compressor.run.evaluate import statistics_of
from compressor.run.measure import size_label
from compressor.run.products import DYNAMIC, PORTABLE, QUANTIZED_GRAPH, Choice, Chosen, RunSizes, ShrunkGraph, Variant
from compressor.run.run_log import RunLog
from compressor.run.variant import build_variant
from compressor.targets import TARGETS, Feeds, target
from compressor.tasks import Data
from graph_passes.passes import ReturnToFloats

_FEW_ROWS = 100
"""Calibration rows below which ranges are uncertain."""
_TIMED_SECONDS = 3.0
"""Maximum time spent on timing one candidate at one size."""
_RANKED_ROWS = 32
"""Calibration rows on which products are ranked."""
_SCORED_ROWS = 2000
"""Maximum number of evaluation rows that every candidate is scored on."""


@dataclass(frozen=True)
class _Trial:
    """A candidate, with its engine if it could be built.

    Attributes:
        choice: its settings.
        candidate: its row of the table.
        variant: its engine; None: there is none.
        source: the quantized graph that it was built from; None: the shrunk graph.
    """

    choice: Choice
    candidate: Candidate
    variant: Variant | None = None
    source: Path | None = None


def choices(config: EngineConfig) -> list[Choice]:
    """Every engine that a configuration allows, in the order in which they are tried."""
    names = tuple(TARGETS) if config.target == AUTO else (config.target,)
    precisions = ("fp32", "int8") if config.precision == AUTO else (config.precision,)
    tried = []
    for name, precision in itertools.product(names, precisions):
        engine = config.model_copy(update={"target": name, "precision": precision})
        if precision != "int8":
            tried.append(Choice(engine))
            continue
        tried.append(Choice(engine, PORTABLE))
        if target(name).quantizes:
            tried.append(Choice(engine, DYNAMIC))
    return tried


def choose_engine(
    graph: ShrunkGraph,
    dense: Variant,
    data: Data | None,
    folder: ModelFolder,
    recipe: Recipe,
    sizes: RunSizes,
    scratch: Path,
    log: RunLog,
) -> Chosen:
    """Try every engine that a recipe allows on the evaluation rows, and build the fastest that keeps the metric.

    Where int8 loses too much, a further candidate returns as few products to floats as keep the metric.

    Args:
        graph: the graph of the compressed variant.
        dense: the dense variant, to compare with.
        data: the rows; None: every engine keeps the metric.
        folder: the model, for inputs to time.
        recipe: targets, precisions, the loss allowed, and the sizes to time.
        sizes: sizes and settings of the engines.
        scratch: folder for engines that are not delivered.
        log: receives stages and notes.

    Raises:
        TargetMissingError: no engine could be built, because runtimes are missing.
    """
    bench = _Bench(graph, dense, data, folder, recipe, sizes, scratch, log)
    tried = choices(recipe.engine)
    quantized = bench.quantize() if any(choice.form == PORTABLE for choice in tried) else None
    trials = [bench.score(bench.build(choice, quantized.path if quantized else None)) for choice in tried]
    if quantized is not None:
        trials += [bench.return_products(trial, quantized) for trial in trials if _loses_too_much(trial)]
    trials = bench.time(trials)
    best = _fastest(trials, data is None or data.task.higher_is_better)
    table = tuple(trial.candidate.model_copy(update={"chosen": trial is best}) for trial in trials)
    log.add_notes(_notes(table, quantized))
    if best.source is not None and quantized is not None and best.source != quantized.path:
        graph_passes.save(graph_passes.load(best.source), quantized.path)
    with log.stage(f"compressed: building the engine ({best.choice.label})"):
        source = quantized.path if best.source is not None and quantized is not None else None
        variant = build_variant(graph, best.choice.config, sizes.build, sizes.cases, quantized=source)
    return Chosen(variant, best.choice, table)


class _Bench:
    """Builds, scores and times candidates of one graph; see `choose_engine` for the arguments."""

    def __init__(
        self,
        graph: ShrunkGraph,
        dense: Variant,
        data: Data | None,
        folder: ModelFolder,
        recipe: Recipe,
        sizes: RunSizes,
        scratch: Path,
        log: RunLog,
    ) -> None:
        self._graph, self._dense, self._data, self._folder = graph, dense, data, folder
        self._recipe, self._sizes, self._scratch, self._log = recipe, sizes, scratch, log
        self._built = itertools.count()

    @functools.cached_property
    def _rows(self) -> list[Feeds]:
        """Calibration rows."""
        assert self._data is not None
        return calibration_rows(self._data, self._recipe.engine.calibration_rows, self._recipe.selection.seed)

    @functools.cached_property
    def _reference(self) -> tuple[float, list[np.ndarray]]:
        """Metric and logits of the dense engine on the evaluation rows."""
        return self._measure(self._dense, "dense")

    def quantize(self) -> QuantizedGraph | None:
        """The portable quantized graph, beside the float graph; None where it cannot be made and others are tried."""
        if self._data is None:
            return None
        with self._log.stage("compressed: quantizing the graph"):
            try:
                out = self._graph.path.with_name(QUANTIZED_GRAPH)
                return quantize_graph(self._graph.path, self._rows, out)
            except TargetMissingError as error:
                if self._recipe.engine.precision != AUTO:
                    raise
                text = f"no portable int8 engine was tried: {error}"
                self._log.add_notes([Note(code=NoteCode.TARGET_MISSING, text=text)])
                return None

    def build(self, choice: Choice, quantized: Path | None) -> _Trial:
        """Build and prove one candidate; a failure is recorded in its row."""
        reason = target(choice.config.target).missing()
        if choice.form == PORTABLE and quantized is None:
            reason = reason or "there is no quantized graph"
        if reason is not None:
            return _failed(choice, reason)
        source = quantized if choice.form == PORTABLE else None
        folder = self._scratch / f"candidate{next(self._built)}"
        folder.mkdir()
        try:
            with self._log.stage(f"trying {choice.label}"):
                variant = build_variant(
                    self._graph, choice.config, self._sizes.build, self._sizes.cases, quantized=source, folder=folder
                )
        except CompressorError as error:
            return _failed(choice, str(error))
        facts = {"file_bytes": file_bytes(variant.engine, self._graph.path), "quantized": variant.engine.quantized}
        return _Trial(choice, choice.row.model_copy(update=facts), variant, source)

    def score(self, trial: _Trial) -> _Trial:
        """The candidate with the metric on the evaluation rows, if there are any."""
        if trial.variant is None or self._data is None or not len(self._data.eval):
            return trial
        reference, answers = self._reference
        metric, logits = self._measure(trial.variant, trial.choice.label)
        max_drop = self._recipe.selection.max_drop
        drop = reference - metric if self._data.task.higher_is_better else metric - reference
        values = {
            "metric": metric,
            "difference": metric - reference,
            "agreement": _agreement(answers, logits),
            "holds": max_drop is None or drop <= max_drop,
        }
        return dataclasses.replace(trial, candidate=trial.candidate.model_copy(update=values))

    def return_products(self, trial: _Trial, quantized: QuantizedGraph) -> _Trial:
        """A candidate of the same target with as few products in floats as keep the metric.

        The products are ranked by what returning each alone does to the outputs; the number is found by bisection.
        """
        label = trial.choice.label
        with self._log.stage(f"{label}: ranking the products") as on_progress:
            ranked = rank_products(quantized.path, self._graph.path, self._rows[:_RANKED_ROWS], on_progress)
        # With every product in floats the engine would not be in int8.
        best, low, high = trial, 0, len(ranked) - 1
        while low < high:
            count = (low + high) // 2
            path = self._scratch / f"returned{next(self._built)}.onnx"
            returned = ReturnToFloats(ranked[: count + 1])(graph_passes.load(quantized.path)).model
            graph_passes.save(returned, path)
            choice = dataclasses.replace(trial.choice, in_float=tuple(ranked[: count + 1]))
            attempt = self.score(self.build(choice, path))
            if attempt.candidate.holds:
                best, high = attempt, count
            else:
                low = count + 1
        return best if best is not trial else _failed(trial.choice, "no number of products in fp32 keeps the metric")

    def time(self, trials: Sequence[_Trial]) -> list[_Trial]:
        """The candidates with their times, and their speed against the dense engine."""
        built = [trial.variant.engine for trial in trials if trial.variant is not None]
        times: list[dict[str, float]] = [{} for _ in (self._dense, *built)]
        measure = self._recipe.measure
        for batch, seq in itertools.product(measure.batch, self._sizes.lengths):
            label = size_label(batch, seq)
            feeds = {name: tensor.numpy() for name, tensor in example_inputs(self._folder, batch, seq or 1).items()}
            with self._log.stage(f"timing all engines, {label}"):
                seconds = min(_TIMED_SECONDS, measure.seconds) * len(times)
                medians = median_times([self._dense.engine, *built], feeds, seconds)
            for row, median in zip(times, medians, strict=True):
                row[label] = 1e3 * median
        reference, rows = times[0], iter(times[1:])
        return [trial if trial.variant is None else _timed(trial, next(rows), reference) for trial in trials]

    def _measure(self, variant: Variant, label: str) -> tuple[float, list[np.ndarray]]:
        """Metric and logits on the evaluation rows."""
        assert self._data is not None
        logits: list[np.ndarray] = []
        rows = self._data.eval.select(range(min(len(self._data.eval), _SCORED_ROWS)))
        batch_size = self._recipe.selection.batch_size
        with self._log.stage(f"{label}: scoring on the evaluation rows") as on_progress:
            statistics = statistics_of(variant, self._data, batch_size, on_progress, rows=rows, on_logits=logits.append)
        return self._data.task.score(statistics), logits


def _failed(choice: Choice, reason: str) -> _Trial:
    return _Trial(choice, choice.row.model_copy(update={"failure": reason, "holds": False}))


def _loses_too_much(trial: _Trial) -> bool:
    return trial.source is not None and not trial.candidate.holds


def _timed(trial: _Trial, milliseconds: dict[str, float], reference: dict[str, float]) -> _Trial:
    """A candidate with its times by size, and the geometric mean of its speeds against the dense engine."""
    speed = float(np.exp(np.mean([np.log(reference[label] / milliseconds[label]) for label in milliseconds])))
    candidate = trial.candidate.model_copy(update={"milliseconds": milliseconds, "speed": speed})
    return dataclasses.replace(trial, candidate=candidate)


def _agreement(expected: Sequence[np.ndarray], logits: Sequence[np.ndarray]) -> float | None:
    """Share of the largest logits that are at the same position; None where there is one logit, or none."""
    pairs = list(zip(expected, logits, strict=False))
    if not pairs or len(expected) != len(logits) or any(a.shape != b.shape or a.shape[-1] < 2 for a, b in pairs):
        return None
    equal = [np.argmax(a, axis=-1) == np.argmax(b, axis=-1) for a, b in pairs]
    return float(np.concatenate([part.ravel() for part in equal]).mean())


def _fastest(trials: Sequence[_Trial], higher_is_better: bool) -> _Trial:
    """The fastest candidate that keeps the metric; the one that loses least where none does.

    Raises:
        TargetMissingError: no candidate could be built.
    """
    built = [trial for trial in trials if trial.variant is not None]
    if not built:
        failures = "; ".join(f"{trial.choice.label}: {trial.candidate.failure}" for trial in trials)
        raise TargetMissingError(f"no engine could be built: {failures}", code=ErrorCode.UNSUPPORTED)
    eligible = [trial for trial in built if trial.candidate.holds]
    if not eligible:
        return max(built, key=lambda trial: _kept(trial.candidate, higher_is_better))
    return max(eligible, key=lambda trial: trial.candidate.speed or 0.0)


def _kept(candidate: Candidate, higher_is_better: bool) -> float:
    """How much of the metric a candidate keeps; more is better."""
    difference = candidate.difference or 0.0
    return difference if higher_is_better else -difference


def _notes(table: Sequence[Candidate], quantized: QuantizedGraph | None) -> Iterator[Note]:
    """What a reader must know about the choice."""
    if any(row.precision == "int8" for row in table) and not int8_instructions():
        text = (
            "this processor has no instructions for sums of int8 products: they are not faster than in fp32, and can"
            " saturate, which the proofs detect; measure int8 on the machine that will serve it"
        )
        yield Note(code=NoteCode.NO_INT8_INSTRUCTIONS, text=text)
    if quantized is not None and quantized.rows < _FEW_ROWS:
        text = (
            f"the ranges of int8 activations were measured on {quantized.rows} rows; with fewer than {_FEW_ROWS} they"
            " are uncertain (--data with more rows, --calibration-rows)"
        )
        yield Note(code=NoteCode.FEW_CALIBRATION_ROWS, text=text)
    if quantized is not None and quantized.in_float:
        text = f"NNCF left {len(quantized.in_float)} products in floats: {', '.join(quantized.in_float)}"
        yield Note(code=NoteCode.PRODUCTS_IN_FLOAT, text=text)
    best = next(row for row in table if row.chosen)
    others = [row for row in table if not row.chosen and not row.failure]
    failed = [row for row in table if row.failure]
    if not best.holds:
        text = f"no engine keeps the metric within --max-drop; {best.label} loses least"
    else:
        text = f"{best.label} is the fastest of {1 + len(others)} engines that were built"
        if any(not row.holds for row in others):
            text += " and keep the metric within --max-drop"
    if failed:
        text += f"; not delivered: {'; '.join(f'{row.label} ({row.failure})' for row in failed)}"
    yield Note(code=NoteCode.ENGINE_CHOSEN, text=text)
