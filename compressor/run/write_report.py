"""The last stage of a run: make the report, and write the files of the output folder besides the engine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import graph_passes
from compressor import report as reports
from compressor.config.recipe_file import command_line
from compressor.config.tasks import OwnTask
from compressor.engines.build import ShrunkGraph, Variant
from compressor.engines.choose import ChosenEngine
from compressor.model_folder import save_companions
from compressor.results import Generation, Refusal, Report, SiteBlocks, TaskCode
from compressor.run.run_context import RunContext
from compressor.run.stages import Results, drop_status
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.targets.graph_facts import graph_digest
from compressor.workdir import MAPS_FILE, QUANTIZED_GRAPHS, link_library_files
from graph_passes import Plan


def make_report(
    run: RunContext,
    selected: SelectedPlan,
    dense: Variant,
    chosen: ChosenEngine,
    results: Results,
    refused: Sequence[graph_passes.Refusal],
    generation: Generation | None,
) -> Report:
    """The report of a run."""
    recipe, model = run.recipe, run.model
    compressed, engine = chosen.variant, chosen.choice.config
    plan = compressed.graph.plan
    evidence = {
        score.split: {"metric": score.metric, "rows": score.rows, "dense": score.dense, "compressed": score.compressed}
        for score in results.scores
    }
    plan = plan.model_copy(update={"evidence": {**plan.evidence, **evidence}})
    neurons, refusals = {group.name for group in plan.feed_forwards}, list[Refusal]()
    for refusal in refused:
        units = "neurons" if neurons.issuperset(refusal.sites) else "heads"
        names = ", ".join(sorted(refusal.sites))
        refusals.append(Refusal(what=names, why=f"its {units} cannot be removed: {refusal}"))
    measured = results.fields(
        compressed,
        recipe.selection.max_drop,
        plan=plan,
        proofs=(*dense.proofs, *compressed.proofs),
        drop_status=drop_status(recipe.selection.max_drop, results.scores),
        refused=tuple(refusals),
        blocks=_site_blocks(run, plan, compressed.graph),
        missing=model.missing,
        budget=selected.budget,
    )
    own_task = model.folder.own_task
    return Report(
        **measured,
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

    Returns:
        The report with the hashes of the graphs.
    """
    model, folder = run.model, run.work.result
    names = ["model.onnx", *QUANTIZED_GRAPHS]
    if run.saves_dense:
        graph_passes.save(graph_passes.load(dense.graph.path), folder / "dense.onnx")
        names.append("dense.onnx")
    graphs = {name: graph_digest(folder / name) for name in names if (folder / name).is_file()}
    save_companions(model.folder, folder)
    link_library_files(folder)
    if (selected.trained or model.folder.needs_weights) and model.folder.file is None:
        from compressor.silence_libraries import quiet_transformers

        with quiet_transformers():
            model.folder.network.save_pretrained(folder)
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


def _site_blocks(run: RunContext, plan: Plan, graph: ShrunkGraph) -> tuple[SiteBlocks, ...]:
    """The blocks of every site from which some were to be dropped."""
    if run.selector is None:
        return ()
    from compressor.block_masks.attention_maps import shares_by_kind

    share = {} if run.blocks is None else shares_by_kind(run.blocks, plan.sites)
    requested = {site.name for site in plan.sites if share.get(site.kind, 0) > 0}
    dense = {name: str(refusal) for refusal in graph.dense for name in refusal.sites}
    return run.selector.site_blocks(plan, requested, graph.lowered, dense, graph.unused)
