"""The whole way: from a model folder to a smaller engine that is proven, measured and reported on."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from accelerate import PartialState

import graph_passes
from compressor import measure, targets
from compressor import model_folder as folders
from compressor import report as reports
from compressor.block_masks import train_masked as blocks
from compressor.block_masks.attention_timer import find_attention_extras
from compressor.block_masks.mask_selector import MaskSelector
from compressor.config.recipe_file import command_line
from compressor.config.run import Recipe
from compressor.environment import machine
from compressor.errors import InputError, UsageError
from compressor.model_folder import ModelFolder, example_inputs, save_companions
from compressor.model_folder.example_inputs import token_limit
from compressor.progress import Listener, NullListener, ProgressCallback
from compressor.report import Refusal, Report, Score, SiteBlocks, Speed, formatting
from compressor.results import Note
from compressor.run import evaluate, plan_source, run_notes, verify
from compressor.run.build_options import build_options
from compressor.run.plan_source import SelectedPlan
from compressor.run.variant import Variant, build, cpu_fallback, rehearsal_plan, require, shrink
from compressor.selection.learn import check_budget, check_options, heads_to_keep, pool_of
from compressor.silence_libraries import quiet_transformers
from compressor.targets.tensorrt.metadata import graph_digest
from compressor.tasks import Data, open_data
from compressor.units import Site, find_sites, keep_all
from compressor.units.entmax import entmax_function
from compressor.workdir import MAPS, WorkDir, open_workdir
from graph_passes import Plan

_COPIES = 4
"""Graphs of the model's size that lie on the disk at once, at least."""


def compress(recipe: Recipe, listener: Listener | None = None) -> Report:
    """Do what a recipe asks for and write its output folder, which appears whole or not at all.

    Under `accelerate launch` every process learns; the helper processes end after that.

    Returns:
        The report. A gate that failed (`report.gate`) is no error here: the evidence is what was asked for.

    Raises:
        CompressorError: one of its kinds, see `compressor.errors`. Work that can be resumed stays in `<out>.partial`.
        GraphPassError: a plan or a graph that cannot be used.
    """
    state = PartialState(cpu=not torch.cuda.is_available())
    searches = recipe.selection.searches and recipe.selects_heads
    if state.num_processes > 1 and searches and recipe.plan_file is None:
        if not state.is_main_process:
            sys.exit(UsageError.exit_code)
        raise UsageError(
            f"{recipe.selection.method} is no training; start it without accelerate launch, or spread it by --ray"
        )
    if not state.is_main_process:
        run_worker(recipe, state)
        sys.exit(0)
    watch = _Watch(listener or NullListener())
    with open_workdir(recipe.output.out, force=recipe.output.force) as work:
        found = _Run(recipe, work, watch, state).report()
        work.finish()
    return found


class _Watch:
    """Passes stages and notes on, and remembers them for the report."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.seconds: dict[str, float] = {}
        self.notes: list[Note] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        start = time.perf_counter()
        with self.listener.stage(name) as tell:
            yield tell
        self.seconds[name] = round(time.perf_counter() - start, 3)

    def note(self, note: Note | str) -> None:
        note = note if isinstance(note, Note) else Note(text=note)
        self.notes.append(note)
        self.listener.note(note)


class _Run:
    """One run: what its stages share."""

    def __init__(self, recipe: Recipe, work: WorkDir, watch: _Watch, state: PartialState) -> None:
        self.recipe, self.work, self.watch, self.state = recipe, work, watch, state
        self.built = recipe  # as the engines are built: a stand-in's where the target is missing
        self.missing: str | None = None

    def report(self) -> Report:
        """Every stage in order; the result lies in `work.result` afterwards."""
        recipe, watch = self.recipe, self.watch
        with watch.stage("loading the model"):
            self.folder, sites = _load(recipe)
            self.work.reserve(_COPIES * sum(weight.nbytes for weight in self.folder.model.state_dict().values()))
        if (lacks := targets.missing(recipe.engine.target)) is not None:
            self.missing = f"{recipe.engine.target}: {lacks}; on the machine to deploy on, say {_later(recipe)}"
            self.built = cpu_fallback(recipe)
            watch.note(
                f"{recipe.engine.target}: {lacks}; everything here was proven and measured with ONNX Runtime on the CPU in"
                f" fp32, nothing with {recipe.engine.target}"
            )
        data = None
        if recipe.rows.available:
            with watch.stage("reading the rows"):
                data = open_data(recipe.rows, self.folder, recipe.selection.seed)
            check_budget(recipe.selection, data)
        chosen = plan_source.load_plan(recipe, self.folder, sites)
        brought = chosen is not None
        longest = token_limit(self.folder.model)
        read = (
            *self.folder.notes,
            *(data.notes if data else ()),
            *run_notes.unused(recipe, longest, learns=chosen is None),
        )
        for note in read:
            watch.note(note)
        reach = _reach(recipe, self.folder, data, chosen)
        if chosen is None and recipe.blocks.maps is not None and reach is not None:
            blocks.opened_maps(recipe.blocks.maps, self.folder.model, sites, reach)
        if reach is not None and data is not None:
            row = min(blocks.reach(self.folder.model, data, recipe), _longest(data))
            if row > reach:
                raise InputError(
                    f"a row of {row} tokens, the plan's masks reach over {reach}; cut rows (--max-length {reach})"
                )
        most = min(reach, _longest(data)) if reach is not None and data is not None else reach
        self.lengths = evaluate.lengths(recipe, self.folder, reach, most)
        known = find_attention_extras(self.folder.model, example_inputs(self.folder, 2, 8)) if reach is not None else {}
        timed = [seq for seq in self.lengths if seq is not None]
        self.planner = MaskSelector(_planned(recipe), timed, most, known)
        tried = verify.cases(lambda *size: example_inputs(self.folder, *size), longest=longest, reach=reach)
        sizes = build_options(recipe, self.lengths, [case.feeds for case in tried], data)
        dense = build("dense", self.folder, keep_all(sites), self.built, tried, self.work, watch, tuning=sizes)
        # What is in the way of a given plan, its own shrink says.
        rehearsed = None if recipe.plan_file else shrink(dense.reference, rehearsal_plan(sites))
        if rehearsed and chosen is None and data is not None:
            require(rehearsed)
            heads = [f"which heads to keep ({recipe.selection.method})"] if recipe.selects_heads else []
            parts = ["which blocks to drop"] if recipe.blocks.drops_any else []
            with watch.stage(f"learning {' and '.join((*heads, *parts))}") as tell:
                store = self.work.learning
                chosen = plan_source.learn_plan(
                    recipe, self.folder, sites, data, store, self.state, watch, tell, self.planner
                )
                self.planner.recall(store / "blocks" / "planned.json")
        assert chosen is not None
        for note in (
            *chosen.notes,
            *run_notes.of_run(self.folder, chosen, data),
            *run_notes.aligned(chosen.plan, (*self.lengths, most), None if brought else most),
        ):
            watch.note(note)
        lower = frozenset[str]()
        if chosen.plan.masks:
            if recipe.engine.target == "trt" and self.missing is None:
                watch.note("where masks pay was timed with ONNX Runtime, not with TensorRT")
            with watch.stage("timing masked attention"):
                lower = self.planner.lowered(chosen.plan)
        work = self.work
        compressed = build("compressed", self.folder, chosen.plan, self.built, tried, work, watch, lower, sizes)
        if emptied := formatting.emptied(chosen.plan, compressed.plan):
            watch.note(emptied)
        scores = evaluate.scores(dense, compressed, data, recipe, watch)
        speeds = evaluate.speeds(dense, compressed, self.folder, recipe, self.lengths, watch)
        return self._written(chosen, dense, compressed, scores, speeds, rehearsed.refused if rehearsed else ())

    def _written(
        self,
        chosen: SelectedPlan,
        dense: Variant,
        compressed: Variant,
        scores: tuple[Score, ...],
        speeds: tuple[Speed, ...],
        refused: tuple[graph_passes.Refusal, ...],
    ) -> Report:
        """Everything that the output folder holds beside the engine."""
        recipe, result, watch = self.recipe, self.work.result, self.watch
        with watch.stage("measuring memory"):
            size = {"batch": recipe.measure.batch[0], "seq": self.lengths[0] or 1}
            facts = {
                "dense": measure.facts(dense.engine, dense.graph, file=None, **size),
                "compressed": measure.facts(
                    compressed.engine, compressed.graph, file=compressed.engine.path.name, **size
                ),
            }
        for note in run_notes.unmeasured(facts):
            watch.note(note)
        graphs = {"model.onnx": graph_digest(compressed.graph)}
        if self.missing is not None:
            graphs["dense.onnx"] = self._kept(dense)
        save_companions(self.folder, result)
        if chosen.trained:
            with quiet_transformers():
                self.folder.model.save_pretrained(result)
        plan = compressed.plan.model_copy(update={"evidence": {**compressed.plan.evidence, **_evidence(scores)}})
        plan.save(result / "plan.json")
        seen: dict[str, Any] = {
            "plan": plan,
            **facts,
            "speeds": speeds,
            "scores": scores,
            "proofs": (*dense.proofs, *compressed.proofs),
            "gate": check_metric_drop(recipe.selection.max_drop, scores),
            "refused": tuple(
                Refusal(what=", ".join(sorted(found.sites)), why=f"its heads cannot be removed: {found}")
                for found in refused
            ),
            "blocks": self._blocks(plan, compressed),
        }
        report = Report(
            verdict=reports.verdict(**seen, max_drop=recipe.selection.max_drop, missing=self.missing),
            **seen,
            model=recipe.source.model.resolve().name,
            family=self.folder.family,
            task=self.folder.task,
            notes=tuple(watch.notes),
            curves=chosen.curves,
            target=self.built.engine.target,
            missing=self.missing,
            graphs=graphs,
            precision=self.built.engine.precision,
            session=dict(compressed.engine.session),
            machine=machine(),
            recipe=recipe.flat(),
            command=command_line(recipe),
            seconds=watch.seconds,
        )
        reports.write(report, result)
        if (watched := self.work.learning / MAPS).is_file():
            shutil.copyfile(watched, result / "maps.safetensors")
        return report

    def _kept(self, dense: Variant) -> str:
        """Put the graph of the dense side beside the other, to be built for the target elsewhere; its hash."""
        kept = self.work.result / "dense.onnx"
        graph_passes.save(graph_passes.load(dense.graph), kept)
        return graph_digest(kept)

    def _blocks(self, plan: Plan, compressed: Variant) -> tuple[SiteBlocks, ...]:
        share = blocks.shares(self.recipe, plan.sites)
        asked = {site.name for site in plan.sites if share[site.kind] > 0}
        dense = {name: str(found) for found in compressed.dense for name in found.sites}
        return self.planner.told(plan, asked, compressed.lowered, dense, compressed.unused)


def _load(recipe: Recipe) -> tuple[ModelFolder, list[Site]]:
    """The model and its sites, and whatever can be known to fail now rather than after an export or learning."""
    if targets.missing(recipe.engine.target) is None:
        targets.check(recipe.engine.target, recipe.engine.precision, recipe.engine.provider, recipe.engine.kernel)
    if recipe.plan_file is None and (recipe.selects_heads or recipe.blocks.drops_any):
        check_options(recipe.selection, heads=recipe.selects_heads, blocks=recipe.blocks.drops_any)
    loading = {"allow_pickle": recipe.source.allow_pickle, "trust_remote_code": recipe.source.trust_remote_code}
    folder = folders.load(recipe.source.model, task=recipe.source.task, needs_processor=True, **loading)
    sites = find_sites(folder.model, example_inputs(folder, 2, 8), attention=recipe.export.attention)
    example_inputs(folder, 1, max(seq or 1 for seq in evaluate.lengths(recipe, folder)))
    if recipe.selection.keep is not None:
        heads_to_keep(recipe.selection.keep, sum(site.heads for site in pool_of(sites, recipe.selection.options)))
    blocks.shares(recipe, sites)
    if recipe.blocks.entmax and recipe.blocks.drops_any:
        entmax_function()
    return folder, sites


def _planned(recipe: Recipe) -> Recipe:
    """As the planner of blocks times: it knows ONNX Runtime alone."""
    return cpu_fallback(recipe) if recipe.engine.target == "trt" else recipe


def _later(recipe: Recipe) -> str:
    """The command that builds for the target of a recipe from its output folder."""
    return shlex.join(["compress", "build", str(recipe.output.out), "--target", recipe.engine.target])


def _reach(recipe: Recipe, folder: ModelFolder, data: Data | None, chosen: SelectedPlan | None) -> int | None:
    """Positions that the masks of the plan reach over, or will; None where there are none."""
    if chosen is None and data is not None and recipe.blocks.drops_any:
        return blocks.reach(folder.model, data, recipe)
    masks = chosen.plan.masks.values() if chosen is not None else ()
    limits = [token_limit(folder.model), *(size for mask in masks for size in (mask.queries, mask.keys))]
    return min(size for size in limits if size is not None) if masks else None


def _longest(data: Data) -> int:
    return max(length for rows in (data.train, data.eval, data.test) for length in (0, *rows["length"]))


def run_worker(recipe: Recipe, state: PartialState) -> None:
    """What a helper process does: learn along. The main process makes and keeps the folder."""
    folder, sites = _load(recipe)
    if recipe.rows.data is not None and recipe.plan_file is None:
        store, data = (
            WorkDir(recipe.output.out.absolute()).learning,
            open_data(recipe.rows, folder, recipe.selection.seed),
        )
        planner = MaskSelector(_planned(recipe), ())  # the main process plans
        plan_source.learn_plan(
            recipe, folder, sites, data, store, state, NullListener(), lambda done, total: None, planner
        )


def _evidence(scores: Sequence[Score]) -> dict[str, Any]:
    return {
        score.split: {"metric": score.metric, "rows": score.rows, "dense": score.dense, "compressed": score.compressed}
        for score in scores
    }


def check_metric_drop(max_drop: float | None, scores: Sequence[Score]) -> Literal["passed", "failed", "not asked"]:
    """Whether the metric fell by no more than is allowed."""
    if max_drop is None:
        return "not asked"
    drops = [-score.difference if score.higher_is_better else score.difference for score in scores]
    return "passed" if all(drop <= max_drop for drop in drops) else "failed"  # a drop that is no number fails
