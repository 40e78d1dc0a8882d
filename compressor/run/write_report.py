"""The last stage of a run: make the report, and write the files of the output folder besides the engine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import graph_passes
from compressor import report as reports
from compressor.block_masks.attention_maps import MAPS_FILE, shares_by_kind
from compressor.config.recipe_file import command_line
from compressor.config.tasks import OwnTask
from compressor.engines.build import Variant
from compressor.engines.choose import ChosenEngine
from compressor.model_folder import save_companions
from compressor.results import (
    Generation,
    Refusal,
    Report,
    Score,
    SiteBlocks,
    TaskCode,
)
from compressor.run.measure import Measurements
from compressor.run.report_fields import EvaluationResult, drop_status, measured_fields
from compressor.run.run_context import RunContext, SelectedPlan
from compressor.silence_libraries import quiet_transformers
from compressor.targets.graph_facts import graph_digest
from compressor.workdir import QUANTIZED_GRAPHS, link_library_files
from graph_passes import Plan


def make_report(
    run: RunContext,
    selected: SelectedPlan,
    dense: Variant,
    chosen: ChosenEngine,
    evaluated: EvaluationResult,
    measured: Measurements,
    refused: Sequence[graph_passes.Refusal],
    generation: Generation | None = None,
) -> Report:
    """The report of a run.

    Args:
        run: the run, with its stages and notes.
        selected: the plan, as it was selected.
        dense: the variant with every unit.
        chosen: the variant of the plan, and the engines that it was chosen among.
        evaluated: the metric of both variants, and their answers to a few rows.
        measured: times, sizes and memory of both variants.
        refused: sites that no plan could shrink.
        generation: the graphs that generate text; None: there are none.
    """
    recipe, model = run.recipe, run.model
    compressed, engine = chosen.variant, chosen.choice.config
    plan = compressed.graph.plan
    plan = plan.model_copy(update={"evidence": {**plan.evidence, **_evidence(evaluated.scores)}})
    measured_here = measured_fields(
        *(plan, compressed, evaluated, measured),
        proofs=(*dense.proofs, *compressed.proofs),
        drop_status=drop_status(recipe.selection.max_drop, evaluated.scores),
        refused=_refusals(refused, plan),
        blocks=_site_blocks(run, plan, compressed),
        max_drop=recipe.selection.max_drop,
        missing=model.missing,
        budget=selected.budget,
    )
    own_task = model.folder.own_task
    return Report(
        **measured_here,
        model=recipe.source.model.resolve().name,
        family=model.folder.family,
        task=model.folder.task if own_task is None else own_task.task_class.name,
        task_code=code_of(own_task),
        candidates=chosen.candidates,
        generation=generation,
        notes=tuple(run.log.notes),
        curves=selected.curves,
        costs=selected.costs,
        certificate=selected.certificate,
        target=engine.target,
        precision=engine.precision,
        delivered=chosen.choice.label,
        recipe=recipe.flat(),
        command=command_line(recipe),
        seconds=run.log.seconds,
    )


def write_output(report: Report, run: RunContext, selected: SelectedPlan, dense: Variant) -> Report:
    """Write plan, report, tokenizer files and trained weights beside the engine of the compressed variant.

    With `save_dense`, and where the machine lacks the target, the dense graph is written too, for the comparison where
    the engine is built.

    Args:
        report: the report without hashes.
        run: the run, whose model has the trained weights, and whose work folder has the `result` to write.
        selected: the plan, and whether weights were trained with it.
        dense: the dense variant.

    Returns:
        The report with the hashes of the graphs.
    """
    model, folder = run.model, run.work.result
    graphs = {
        name: graph_digest(folder / name) for name in ("model.onnx", *QUANTIZED_GRAPHS) if (folder / name).is_file()
    }
    if run.saves_dense:
        graphs["dense.onnx"] = _save_dense(dense, folder / "dense.onnx")
    save_companions(model.folder, folder)
    link_library_files(folder)
    if (selected.trained or model.folder.needs_weights) and model.folder.file is None:
        with quiet_transformers():
            model.folder.model.save_pretrained(folder)
    report = report.model_copy(update={"graphs": graphs})
    report.plan.save(folder / "plan.json")
    reports.write(report, folder)
    # What is learned before a distillation has a folder of its own.
    if (maps := next(run.work.learning.rglob(MAPS_FILE), None)) is not None:
        shutil.copyfile(maps, folder / MAPS_FILE)
    return report


def code_of(own_task: OwnTask | None) -> TaskCode | None:
    """The code of a custom task, as a report states it."""
    return None if own_task is None else TaskCode(path=own_task.path, source=own_task.source)


def _refusals(refused: Sequence[graph_passes.Refusal], plan: Plan) -> tuple[Refusal, ...]:
    """Groups that cannot be shrunk, as the report names them."""
    return tuple(
        Refusal(what=", ".join(sorted(refusal.sites)), why=f"its {_units(refusal, plan)} cannot be removed: {refusal}")
        for refusal in refused
    )


def _units(refusal: graph_passes.Refusal, plan: Plan) -> str:
    """The type of the units of groups that cannot be shrunk."""
    neurons = {group.name for group in plan.feed_forwards}
    return "neurons" if neurons.issuperset(refusal.sites) else "heads"


def _save_dense(dense: Variant, path: Path) -> str:
    """Write the dense graph with its external data; return the hash of both."""
    graph_passes.save(graph_passes.load(dense.graph.path), path)
    return graph_digest(path)


def _evidence(scores: Sequence[Score]) -> Mapping[str, Any]:
    """The metric before and after, for the plan's `evidence`."""
    return {
        score.split: {"metric": score.metric, "rows": score.rows, "dense": score.dense, "compressed": score.compressed}
        for score in scores
    }


def _site_blocks(run: RunContext, plan: Plan, compressed: Variant) -> tuple[SiteBlocks, ...]:
    """The blocks of every site from which some were to be dropped."""
    share = {} if run.blocks is None else shares_by_kind(run.blocks, plan.sites)
    requested = {site.name for site in plan.sites if share.get(site.kind, 0) > 0}
    dense = {name: str(refusal) for refusal in compressed.graph.dense for name in refusal.sites}
    return run.selector.site_blocks(plan, requested, compressed.graph.lowered, dense, compressed.graph.unused)
