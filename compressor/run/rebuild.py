"""The engine of a finished run for another runtime, or on another machine: built, proven and measured from its folder.

The folder needs no more than the run left in it. Where the model folder and the rows of the run are at hand too, the
metric is measured on the engines.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic
import torch

from compressor import measure, targets
from compressor import model_folder as folders
from compressor import report as reports
from compressor.config.fields import flag_of
from compressor.config.run import BUILD_FIELDS, Recipe, current_fields
from compressor.environment import machine
from compressor.errors import CompressorError, InputError, UsageError
from compressor.measure import interleave, require_run
from compressor.progress import Listener
from compressor.report import EngineFacts, Proof, Report, Score, Speed
from compressor.run import evaluate, run_notes, verify
from compressor.run.build_options import build_options
from compressor.run.pipeline import check_metric_drop
from compressor.run.variant import Variant, make_engine
from compressor.run.verify import Case
from compressor.targets.random_inputs import fixed_batch, random_feeds
from compressor.targets.tensorrt.metadata import graph_digest, papers_of
from compressor.tasks import Data, open_data
from compressor.workdir import locked
from graph_passes import load
from graph_passes.block_sparse.masks import REACH


def rebuild(out: Path, asked: Mapping[str, Any], listen: Listener) -> Report:
    """Build the engine of a run's folder, and write it and a new report there once all proofs hold.

    Args:
        out: the folder.
        asked: fields of the recipe, of `BUILD_FIELDS`, that shall be other than they were in the run.
        listen: hears of the stages.

    Raises:
        UsageError: a field is out of its range.
        InputError: the folder is none that a run has written, its graph is not the one that was proven, or a size to
            time is more than the model takes; the folder is as it was.
        TargetMissingError: the runtime or its device is not here; the folder is as it was.
        MismatchError: the engine does not compute what the graph computes; the folder is as it was.
    """
    before = reports.load(out)
    recipe = _recipe(before, asked)
    targets.check(recipe.engine.target, recipe.engine.precision, recipe.engine.provider, recipe.engine.kernel)
    graph, dense = out / "model.onnx", out / "dense.onnx"
    for path in (graph, *([dense] if dense.name in before.graphs else [])):
        if not path.is_file():
            raise InputError(f"{path}: is missing; copy the whole folder of the run")
        if before.graphs.get(path.name) not in (None, graph_digest(path)):
            raise InputError(
                f"{path}: is not the graph that the run has proven; copy the whole folder of the run again"
            )
    with locked(out), tempfile.TemporaryDirectory(prefix=".build-", dir=out) as scratch:
        made = _Build(before, recipe, graph, dense if dense.is_file() else None, Path(scratch), listen)
        report = made.report()
        if made.lost:
            for name in (reports.JSON_NAME, reports.HTML_NAME):
                shutil.copyfile(out / name, out / f"run-{name}")
        _put(Path(scratch) / "compressed", out, targets.ENGINE_FILES[recipe.engine.target], report)
    return report


_OF_AN_ENGINE: Mapping[str, Any] = {
    "file": None,
    "peak_memory_bytes": None,
    "attentions": 0,
    "fused": 0,
    "optimization": "not built",
    "built": None,
}
"""Facts that are an engine's and not its graph's, where there is none."""


class _Build:
    """One build: what its stages share."""

    def __init__(
        self, before: Report, recipe: Recipe, graph: Path, dense: Path | None, scratch: Path, listen: Listener
    ) -> None:
        self.before, self.recipe, self.scratch, self.listen = before, recipe, scratch, listen
        self.graphs: dict[verify.VariantName, Path] = {"dense": dense} if dense is not None else {}
        self.graphs["compressed"] = graph
        timed: tuple[int | None, ...] = tuple(dict.fromkeys(row.seq for row in before.speeds))
        self.lengths = recipe.measure.seq or timed or (128,)
        self.tried = _cases(graph, max(seq or 1 for seq in self.lengths))
        self.notes: list[str] = []
        self.lost = False

    def report(self) -> Report:
        before, recipe = self.before, self.recipe
        data = self._rows()
        sizes = build_options(recipe, self.lengths, [case.feeds for case in self.tried], data)
        sides = {name: self._side(name, graph, sizes) for name, graph in self.graphs.items()}
        scores = self._scores(sides, data)
        speeds = tuple(self._speeds(sides))
        if (kernel := before.recipe.get("kernel")) and recipe.engine.kernel is None and recipe.engine.target == "ort":
            self._note(f"the run's kernel, {kernel}, is not used: it is not here, or not for this provider (--kernel)")
        if "dense" not in sides:
            self._note(
                "the run left no dense.onnx: the engine was proven, and compared with no dense one, of which the report"
                " has only what its graph tells"
            )
        self.lost = bool((before.speeds and not speeds) or (before.scores and not scores))
        if self.lost:
            self._note("what the run measured and this build could not is kept in run-report.html and run-report.json")
        for note in run_notes.aligned(before.plan, self.lengths):
            self._note(note)
        measured = {"batch": recipe.measure.batch[0], "seq": self.lengths[0] or 1}
        with self.listen.stage("measuring memory"):
            facts: dict[str, EngineFacts] = {
                name: measure.facts(
                    side.engine, side.graph, file=side.engine.path.name if name == "compressed" else None, **measured
                )
                for name, side in sides.items()
            }
        for note in run_notes.unmeasured(facts):
            self._note(note)
        carried = [proof for proof in before.proofs if proof.stage != "shrunk graph = engine"] if before.graphs else []
        built, max_drop = sides["compressed"].engine, before.recipe.get("max_drop")
        # What failed on another engine has not passed on this one.
        gate = check_metric_drop(max_drop, scores) if scores else "failed" if before.gate == "failed" else "not asked"
        # Told though nothing may have been timed: another build of the folder goes by them.
        lengths = {"seq": list(self.lengths)} if None not in self.lengths else {}
        seen: dict[str, Any] = {
            "plan": before.plan,
            "dense": facts.get("dense", before.dense.model_copy(update=_OF_AN_ENGINE)),
            "compressed": facts["compressed"],
            "speeds": speeds,
            "scores": scores,
            "proofs": (*carried, *(proof for side in sides.values() for proof in side.proofs)),
            "gate": gate,
            "refused": before.refused,
            "blocks": before.blocks,
        }
        return before.model_copy(
            update={
                **seen,
                "verdict": reports.verdict(**seen, max_drop=max_drop),
                "notes": tuple(dict.fromkeys((*self._notes_of_run(), *self.notes))),
                "missing": None,
                "target": recipe.engine.target,
                "precision": recipe.engine.precision,
                "session": dict(built.session),
                "machine": machine(),
                "recipe": {
                    **before.recipe,
                    **{name: value for name, value in recipe.flat().items() if name in BUILD_FIELDS},
                    **lengths,
                },
            }
        )

    def _notes_of_run(self) -> Iterator[str]:
        """What the run noted, but for what it could not build and this could."""
        absent = f"{self.before.recipe.get('target')}: " if self.before.missing is not None else None
        return (note for note in self.before.notes if absent is None or not note.startswith(absent))

    def _side(self, name: verify.VariantName, graph: Path, sizes: targets.BuildOptions) -> Variant:
        place = self.scratch / name
        place.mkdir()
        with self.listen.stage(f"{name}: building the engine"):
            engine = make_engine(graph, place, self.recipe, sizes)
            proof: Proof = verify.require(verify.prove_engine(graph, engine, self.tried, name))
        return Variant(name, self.before.plan, graph, graph, engine, (proof,))

    def _speeds(self, sides: Mapping[verify.VariantName, Variant]) -> Iterator[Speed]:
        model = load(self.graphs["compressed"])
        sizes = itertools.product(self.recipe.measure.batch, self.lengths)
        tried = {(batch, seq): random_feeds(model, batch, seq or 1) for batch, seq in sizes}
        for side in sides.values():
            for (batch, seq), feeds in tried.items():
                require_run(side.engine, side.graph, feeds, batch, seq or 1)
        if len(sides) == 2:
            for (batch, seq), feeds in tried.items():
                told = f"timing both, batch {batch}" + (f", {seq} tokens" if seq else "")
                engines = sides["dense"].engine, sides["compressed"].engine
                with self.listen.stage(told) as tell:
                    yield interleave(
                        *engines, feeds, batch=batch, seq=seq, seconds=self.recipe.measure.seconds, tell=tell
                    )

    def _rows(self) -> Data | None:
        """The rows of the run, where they and its model folder are here."""
        if not self.before.scores or "dense" not in self.graphs:
            return None
        try:
            recipe = Recipe(**{**current_fields(self.before.recipe), "out": self.scratch})
            with self.listen.stage("reading the rows"):
                folder = folders.load(recipe.source.model, task=recipe.source.task, needs_processor=True)
                return open_data(recipe.rows, folder, recipe.selection.seed)
        except (CompressorError, pydantic.ValidationError):
            earlier = ", ".join(
                f"{score.metric} {score.dense:.4g} to {score.compressed:.4g}" for score in self.before.scores
            )
            self._note(
                f"the rows or the model folder of the run are not here, so the metric was not measured on this engine"
                f" ({self.before.session.get('runtime', 'another runtime')} measured {earlier})"
            )
            return None

    def _scores(self, sides: Mapping[verify.VariantName, Variant], data: Data | None) -> tuple[Score, ...]:
        return evaluate.scores(sides["dense"], sides["compressed"], data, self.recipe, self.listen) if data else ()

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.listen.note(text)


def _recipe(before: Report, asked: Mapping[str, Any]) -> Recipe:
    """The run's recipe with what is asked for; of the run's, only what decides how to build and time."""
    kept = {name: value for name, value in before.recipe.items() if name in BUILD_FIELDS and value is not None}
    if "target" in asked and asked["target"] != kept.get("target"):
        kept = {name: kept[name] for name in kept if name in ("batch", "seq", "seconds")}
    if asked.get("provider") == "cuda" or not Path(kept.get("kernel", "")).is_file():
        kept.pop("kernel", None)  # it was made for the machine of the run
    try:
        return Recipe(**{**kept, **asked, "model": Path(os.devnull), "seed": before.recipe.get("seed", 0)})
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        says = " ".join(str(first["msg"]).removeprefix("Value error, ").split())
        # What concerns several fields begins with the name of one.
        raise UsageError(f"{flag_of(str(first['loc'][0]))}: {says}" if first["loc"] else f"--{says}") from error


def _cases(graph: Path, longest: int) -> tuple[Case, ...]:
    """Inputs to prove an engine on, no longer than what is timed or than its masks reach; of the batch that the graph
    fixes, if it does."""
    model = load(graph)
    fixed = fixed_batch(model)

    def drawn(batch: int, seq: int, seed: int) -> dict[str, torch.Tensor]:
        feeds = random_feeds(model, fixed or batch, seq, seed=seed, padded=batch > 1)
        return {name: torch.from_numpy(array) for name, array in feeds.items()}

    reach = json.loads(model.metadata_props.get(REACH, "{}"))
    return verify.cases(drawn, longest=longest, reach=min(reach.values(), default=None))


def _put(made: Path, out: Path, engine: str, report: Report) -> None:
    """Move what was built into the folder, with its report, whole or not at all.

    The file without which nothing loads the engine goes first and comes last, behind the report: for a plan its
    metadata, for a graph, whose weights lie beside it, the graph. So no engine of this target lies beside the report of
    another. Engines of other targets stay.
    """
    papers = papers_of(out / engine).name
    last = papers if (made / papers).is_file() else engine
    (out / last).unlink(missing_ok=True)
    for path in sorted(made.iterdir()):
        if path.name != last:
            path.replace(out / path.name)
    reports.write(report, out)
    (made / last).replace(out / last)
