"""One run from a model folder to proven, measured engines: the list of its stages.

load -> sizes -> export, shrink, build (dense) -> steps -> export, shrink, build (compressed) -> evaluate -> measure ->
report. The steps and the stages after them are repeated for each rung of a ladder. Each stage is a function from frozen
results to a frozen result, in a module of its own. This module alone knows their order; `walk` carries out the steps.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from compressor.config.fields import flag_of, is_path
from compressor.config.run import Recipe
from compressor.config.sections import FIELDS, ROW_SOURCES, EngineConfig
from compressor.config.step_list import steps_of
from compressor.config.steps import Follow, Step, Units, part_of, parts_of
from compressor.config.unused_flags import nothing_learned_note, order_notes, unused_field_notes
from compressor.engines.build import ExportedGraph, ShrunkGraph, Variant, drops_unread, require_complete
from compressor.engines.choices import Choice, choices
from compressor.engines.choose import ChosenEngine, choose_engine
from compressor.engines.export import rehearse
from compressor.engines.matmul_times import MatmulTimes
from compressor.engines.prove import prove_graphs
from compressor.engines.quantize import quantize_as
from compressor.engines.score import EvaluationScorer
from compressor.errors import CompressorError, ErrorCode, UsageError
from compressor.model_folder import example_feeds_by_size
from compressor.model_folder.fingerprints import record_weights, weight_fingerprints
from compressor.model_folder.text_limits import token_limit
from compressor.processes import RunProcesses, by_main, process_state
from compressor.progress import Listener, NullListener, RunLog
from compressor.quantization import output_distance
from compressor.report import frontier_page
from compressor.report.frontier import Frontier, Rung, rung_of
from compressor.results import Note, NoteCode, Report, VariantName
from compressor.run import run_notes
from compressor.run.generation import deliver_cached, export_cached
from compressor.run.load import load_folder, load_model, missing_target, read_rows, with_point, with_row_layout
from compressor.run.plan_source import compared_plan, load_plan, on_first_model, selection_notes, whole_plan
from compressor.run.run_context import RunContext, RunInputs, RunSizes
from compressor.run.sizes import work_out_sizes
from compressor.run.step_stores import open_stores, step_store
from compressor.run.steps.base import Graphs, Rungs, State, StepContext, functions_of, stored_state
from compressor.run.steps.units import delivered_rows
from compressor.run.write_report import make_report, write_output
from compressor.selection.checks import check_every_option
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.store import Store
from compressor.targets import DEFAULT_TARGET, target
from compressor.tasks.calibration import calibration_rows
from compressor.units import keep_all
from compressor.workdir import LADDER, WorkDir, open_workdir
from graph_passes import GraphPassError, Refusal

if TYPE_CHECKING:
    from compressor.block_masks.mask_selector import MaskSelector

_COPIES = 4
"""Minimum number of graphs of the model's size that are on the disk at the same time."""
_COMPARED_ROWS = 32
"""Calibration rows on which a quantized graph is compared with its float graph."""


@overload
def compress(model: Recipe, rows: Listener | None = None, /, listener: Listener | None = None) -> Report: ...
@overload
def compress(
    model: str | Path, rows: str | Path | None = None, /, listener: Listener | None = None, **fields: Any
) -> Report: ...
def compress(
    model: Recipe | str | Path,
    rows: str | Path | Listener | None = None,
    /,
    listener: Listener | None = None,
    **fields: Any,
) -> Report:
    """Run a recipe and write its output folder, which appears complete or not at all.

    `compress("model", "rows.tsv", steps=[...])` is short for `compress(Recipe(model="model", data="rows.tsv",
    steps=[...]))`. Under `accelerate launch` every process learns; the worker processes end after that.

    Args:
        model: the recipe, or the model folder or ONNX file.
        rows: the training rows, if a model is given; else the listener.
        listener: receives stages, progress and notes.
        **fields: further fields of the recipe of a model.

    Returns:
        The report. A metric that fell too far (`report.drop_status`) raises no error: the output is the evidence.

    Raises:
        CompressorError: see `compressor.errors`. Work that can be resumed stays in `<out>.partial`.
        GraphPassError: a plan or a graph cannot be used.
    """
    if isinstance(model, Recipe):
        if fields or isinstance(rows, str | Path):
            text = "a recipe has its own rows and fields; set them there, as in Recipe(model=..., data=...)"
            raise UsageError(text, code=ErrorCode.INVALID_VALUE, field=next(iter(fields), "data"))
        recipe, listener = model, listener or rows
    elif not isinstance(model, str | Path):
        text = (
            f"{model!r}: neither a recipe nor a model; use compress(Recipe(model=...)) or compress('model', 'rows.tsv')"
        )
        raise UsageError(text, code=ErrorCode.INVALID_VALUE, value=model)
    elif rows is not None and not isinstance(rows, str | Path):
        text = f"{type(rows).__name__}: no file of rows; use compress('model', 'rows.tsv', listener=...)"
        raise UsageError(text, code=ErrorCode.INVALID_VALUE, field="data", value=rows)
    else:
        recipe = Recipe(model=model, **(fields if rows is None else {**fields, "data": rows}))
    (report,) = run_rungs([recipe], listener or NullListener())
    return report


def run_rungs(rungs: Sequence[Recipe], listener: Listener, shared: Path | None = None) -> Iterator[Report]:
    """Walk the steps of rungs, each of which is delivered to its output folder before the next one begins.

    The rungs share the model, the rows, and the graph and the engine of the whole model. A rung begins with the weights
    of the model folder; its step `units` goes on from the folder of an earlier rung where it names one. Every process
    of a distributed run calls this; the worker processes end after the last step.

    Args:
        rungs: their recipes, which differ in their steps and output folders alone; one for a run without a ladder.
        shared: a folder for the graph of the whole model, which is removed; None: it is that of the only rung.

    Yields:
        The report of each rung, when its folder is complete.

    Raises:
        CompressorError: see `compress`; the folders of the rungs before are complete.
        GraphPassError: see `compress`.
    """
    if not rungs:
        return
    state, (first, *later) = process_state(), rungs
    if not state.is_main_process:  # it exports, builds, proves and measures nothing
        log, work = RunLog(NullListener()), WorkDir(first.output.out.absolute())
        walk(whole := load_context(first, work, log, state, later))
        for recipe in later:
            walk(next_rung(whole, recipe, WorkDir(recipe.output.out.absolute()), log))
        sys.exit(0)
    with ExitStack() as stack:
        for number, recipe in enumerate(rungs):
            _refuse_inputs_inside_output(recipe)
            with open_workdir(recipe.output.out, force=recipe.output.force) as work:
                if number == 0:
                    log, kept = RunLog(listener), work
                    if shared is not None:
                        kept = stack.enter_context(work.with_scratch(shared))
                    whole = load_context(first, kept, log, state, later)
                    graphs = _export_whole(whole)
                    run, before = replace(whole, work=work), log.later()
                else:
                    run = next_rung(whole, recipe, work, before.later())
                learned, began = walk(run, graphs), time.perf_counter()
                report = _deliver(run, learned, graphs)
                if learned.rungs is not None:
                    _deliver_rungs(run, learned.rungs, graphs, report, time.perf_counter() - began)
                work.finish()
            yield report


def _refuse_inputs_inside_output(recipe: Recipe) -> None:
    """Raise UsageError if the folder that `--force` replaces holds a file that the run reads or keeps."""
    out = recipe.output.out.resolve()
    if not (recipe.output.force and out.exists()):
        return
    paths = [name for name, field in FIELDS.items() if is_path(field) and name != "out"]
    named = [(name, recipe.value(name)) for name in (*paths, *ROW_SOURCES)]
    named += [(name, value) for step in parts_of(steps_of(recipe)) for name, value in step if isinstance(value, Path)]
    for name, value in named:
        if value is not None and Path(value).exists() and Path(value).resolve().is_relative_to(out):
            raise UsageError(
                f"{flag_of(name)} {value}: inside {recipe.output.out}, which --force replaces; write to another folder"
                " (-o)",
                code=ErrorCode.CONTRADICTION,
                fields=(name, "out"),
                value=value,
            )


def load_context(
    recipe: Recipe, work: WorkDir, log: RunLog, state: RunProcesses, later: Sequence[Recipe] = ()
) -> RunContext:
    """Load the model, the rows and the plan to follow, check the steps, and work out the sizes.

    Every process calls this. `next_rung` begins the later rungs, on the same model and rows.

    Raises:
        CompressorError: the model, the rows, the plan or a step cannot be used.
    """
    with log.stage("loading the model"):
        recipe, first_notes = on_first_model(recipe)
        rungs = [_steps_before_start(rung) for rung in later]
        steps = (*steps_of(recipe), *itertools.chain(*rungs))
        check_every_option(steps)
        for step in steps:
            functions_of(step).check_options(step)
        model = load_model(recipe, steps)
        if state.is_main_process:
            work.reserve(_COPIES * model.folder.access.nbytes)
    if model.missing is not None:
        log.add_notes([run_notes.missing_target_note(model.missing)])
    data = None
    if recipe.rows.sources:
        with log.stage("reading the rows"):
            data = read_rows(recipe, steps, model)
            model = with_row_layout(model, data)
            recipe, notes = with_point(recipe, data, model)
        log.add_notes(notes)
    steps, built = steps_of(recipe), _built(recipe, has_target=model.missing is None)
    inputs = RunInputs(recipe, steps, model, data, load_plan(steps, recipe, model))
    for part in (steps, *rungs):
        for number, step in enumerate(part):
            functions_of(step).check(step, inputs, part[:number])
    log.add_notes(first_notes)
    log.add_notes(model.folder.notes)
    log.add_notes(data.notes if data else ())
    log.add_notes(unused_field_notes(recipe, token_limit(model.folder.model)))
    log.add_notes(order_notes(recipe))
    if not steps:
        log.add_notes([nothing_learned_note(recipe, has_heads=bool(model.sites))])
    sizes = work_out_sizes(inputs)
    selector = _mask_selector(inputs, sizes)
    timed = example_feeds_by_size(model.folder, itertools.product(recipe.measure.batch, sizes.lengths))
    matmul_times = MatmulTimes(list(timed.values()), log)
    return RunContext(
        *(recipe, steps, model, data, inputs.followed, built, sizes, selector, work, log, state, timed, matmul_times)
    )


def next_rung(run: RunContext, recipe: Recipe, work: WorkDir, log: RunLog) -> RunContext:
    """A rung after others of the same run: the model has the weights of its folder again."""
    run.state.wait_for_everyone()  # the main process delivers the rung before, on which the key of this one depends
    run.model.folder.access.load_state(load_folder(recipe, recipe.source.model).access.state())
    missing = run.model.missing
    model = replace(run.model, missing=missing and missing_target(recipe, missing.reason))
    built = _built(recipe, has_target=missing is None)
    return replace(run, recipe=recipe, steps=steps_of(recipe), model=model, built=built, work=work, log=log)


def _steps_before_start(recipe: Recipe) -> tuple[Step, ...]:
    """The steps of a later rung without the folder that it goes on from, which does not exist yet."""
    steps = steps_of(recipe)
    return tuple(step.model_copy(update={"start_from": None} if isinstance(step, Units) else {}) for step in steps)


def _mask_selector(inputs: RunInputs, sizes: RunSizes) -> MaskSelector | None:
    """The selector of masks, which times the forms of masked attention at the sizes of the run; None without masks."""
    if sizes.mask_reach is None:
        return None
    from compressor.block_masks.mask_selector import MaskSelector, find_attention_extras
    from compressor.model_folder import example_inputs

    recipe, model = inputs.recipe, inputs.model
    extras = find_attention_extras(model.folder.network, example_inputs(model.folder, 2, 8))
    # Single attentions are timed with ONNX Runtime alone.
    timed = recipe if recipe.engine.target == DEFAULT_TARGET else cpu_fallback(recipe)
    lengths = [seq for seq in sizes.lengths if seq is not None]
    return MaskSelector(timed, lengths, sizes.longest_row, extras, blocks=inputs.blocks)


def _built(recipe: Recipe, *, has_target: bool) -> Recipe:
    """The recipe by which engines that read whole texts are built."""
    if not has_target:
        return cpu_fallback(recipe)
    precision = recipe.engine.definite_precision
    return recipe if recipe.engine.weight_precision is None else recipe.updated(precision=precision)


def cpu_fallback(recipe: Recipe) -> Recipe:
    """The recipe for ONNX Runtime on the CPU in fp32, which replaces a target that this machine lacks."""
    return recipe.updated(target=DEFAULT_TARGET, precision="fp32", provider="cpu")


def _export_whole(run: RunContext) -> Graphs:
    """Export the whole model, and build the engine that results are compared with."""
    reference = run.export("dense", keep_all(run.model.groups or run.model.sites))
    compared = compared_plan(run.recipe, run.model, run.followed)
    start = reference if compared is None else run.export("dense", compared, template=reference)
    dense = run.stages.build(run.shrink(start), run.built.engine.reference)
    return Graphs(reference, dense, _rehearse(run, reference), export_cached(run))


def _deliver(run: RunContext, learned: State, graphs: Graphs) -> Report:
    """Export, build, prove, score and measure a plan, whose weights the model has, and write its folder."""
    log, dense = run.log, graphs.dense
    log.add_notes(learned.selected.notes)
    log.add_notes(selection_notes(run.model.folder, learned.selected, run.data))
    learned_row = None if run.blocks is None else run.sizes.longest_row
    masked = (*run.sizes.lengths, run.sizes.longest_row)
    log.add_notes(run_notes.mask_notes(learned.selected.plan, masked, learned_row))
    graph = _compress_graph(run, graphs.reference, learned.selected)
    rewritten = _build_rewritten(run, graphs.reference, graph, learned.selected)
    if run.model.missing is not None:
        _quantize_for_target(run, graph)
    scorer = learned.scorer or run.stages.scorer(dense)
    chosen = _build_compressed(run, graph, scorer, learned)
    saved = {"dense.onnx": dense.graph.path} if run.saves_dense else {}
    fixed = prove_graphs(run.work.result, run.sizes.cases, log, saved)
    chosen = replace(chosen, variant=replace(chosen.variant, proofs=(*chosen.variant.proofs, *fixed)))
    log.add_notes(run_notes.emptied_head_notes(learned.selected.plan, chosen.variant.graph.plan))
    variants = {variant.name: variant for variant in filter(None, (dense, rewritten, chosen.variant))}
    configs: dict[VariantName, EngineConfig] = {"dense": run.built.engine.reference, "compressed": chosen.choice.config}
    cached = deliver_cached(run, learned.selected.plan, graphs.cached, dense, chosen, scorer)
    scored = chosen.scored if cached.scorer is scorer else None
    results = run.stages.finish(variants, configs, cached.scored, cached.scorer, scored)
    speeds = results.speeds if run.model.missing is None else ()
    budget, missed = delivered_rows(learned.selected.budget, speeds, cached.generation)
    log.add_notes(missed)
    selected = replace(learned.selected, budget=budget)
    chosen = replace(chosen, variant=replace(chosen.variant, proofs=(*chosen.variant.proofs, *cached.proofs)))
    report = make_report(run, selected, dense, chosen, results, graphs.refused, cached.generation)
    return write_output(report, run, selected, dense)


def _compress_graph(run: RunContext, reference: ExportedGraph, selected: SelectedPlan) -> ShrunkGraph:
    """The graph without the units that the plan drops: that of the whole model, with other gates and weights."""
    lower: Collection[str] = frozenset()
    if selected.plan.masks:
        assert run.selector is not None
        runtime = run.recipe.engine.target
        if runtime != DEFAULT_TARGET and run.model.missing is None:
            text = f"whether masks pay was timed with ONNX Runtime, not with {runtime}"
            run.log.add_notes([Note(code=NoteCode.MASKS_TIMED_ELSEWHERE, text=text)])
        with run.log.stage("timing masked attention"):
            lower = run.selector.lowered(selected.plan)
    graph = run.compress_graph(reference, selected.plan, lower)
    run.log.add_notes(run_notes.graph_notes(graph))
    return graph


def _build_rewritten(
    run: RunContext, reference: ExportedGraph, graph: ShrunkGraph, selected: SelectedPlan
) -> Variant | None:
    """The dense engine with the rewrites of the compressed one; None where there are none, or nothing else was done."""
    engine = run.built.engine
    is_rewritten = graph.thinned or "norm_seconds" in target(engine.reference.target).options
    if not is_rewritten or not (selected.plan.drops_any or engine.chooses):
        return None
    thinned = run.shrink(reference, name="rewritten", drop_unread=drops_unread(run.recipe.export, run.recipe.engine))
    return run.stages.build(thinned, engine.reference)


def _build_compressed(run: RunContext, graph: ShrunkGraph, scorer: EvaluationScorer, learned: State) -> ChosenEngine:
    """The engine of the compressed graph: the one that is configured, or the fastest that keeps the metric."""
    if not run.built.engine.chooses:
        return ChosenEngine(run.stages.build(graph, run.built.engine), Choice(run.built.engine))
    trials = run.engine_trials(graph, scorer, run.work.scratch)
    if learned.engine is None:
        return choose_engine(trials, None)
    first = replace(learned.engine.choice, in_float=())
    # Units were removed for the first one; another is better than none.
    otherwise = [choice for choice in choices(run.built.engine, has_rows=trials.has_rows) if choice != first]
    chosen = choose_engine(trials, [first], otherwise=otherwise)
    candidates = (row.model_copy(update={"has_all_units": True}) for row in learned.engine.candidates)
    return replace(chosen, candidates=tuple(candidates))


def _quantize_for_target(run: RunContext, graph: ShrunkGraph) -> None:
    """Write the quantized graph that another machine builds the engine from, since only this one has the rows."""
    engine, data = run.recipe.engine, run.data
    file = target(engine.target).quantized_graph(engine.definite_precision)
    if file is None or data is None:
        return
    rows = calibration_rows(data, engine.calibration_rows, run.recipe.selection.seed)
    with run.log.stage("compressed: quantizing the graph") as on_progress:
        quantized = quantize_as(file, graph.path, rows, on_progress)
        distance = output_distance(quantized.path, graph.path, rows[:_COMPARED_ROWS])
    text = (
        f"compress build makes the {engine.precision} engine of {engine.target} from {file}; its metric was not"
        f" measured. The mean squared difference of its outputs from those in fp32 is {distance:.2g} of their mean"
        " square"
    )
    run.log.add_notes([Note(code=NoteCode.QUANTIZED_FOR_TARGET, text=text)])


def _deliver_rungs(run: RunContext, rungs: Rungs, graphs: Graphs, report: Report, seconds: float) -> None:
    """Deliver slower plans that hold the metric like that of the run, each in a folder, with the page of all.

    `report` is that of the run, whose engine is the last rung; its delivery took `seconds`.
    """
    max_drop, listed, ended = run.recipe.selection.max_drop, list[Rung](), None
    for name, load in rungs.milder.items():
        if time.perf_counter() + seconds > rungs.deadline:
            ended = f"{name}: no time is left to build it"
            break
        try:
            rung = replace(run, work=run.work.rung(name), log=run.log.separate())
            listed.append(rung_of(name, delivered := _deliver(rung, load(), graphs), max_drop, is_judged=True))
            run.log.add_notes([Note(code=NoteCode.RUNG_FINISHED, text=f"rung {name}: {delivered.verdict}")])
        except (CompressorError, GraphPassError) as error:
            shutil.rmtree(run.work.result / LADDER / name, ignore_errors=True)
            ended = f"{name}: {error}"
            break
    listed.append(rung_of(rungs.name, report, max_drop, folder="..", is_judged=True))
    frontier = Frontier(model=report.model, max_drop=max_drop, rungs=tuple(listed), is_judged=True, ended=ended)
    frontier_page.write(frontier, run.work.result / LADDER)
    if ended is not None:
        run.log.add_notes([Note(code=NoteCode.LADDER_ENDED, text=frontier.ending)])


def _rehearse(run: RunContext, reference: ExportedGraph) -> Sequence[Refusal]:
    """The groups that cannot be removed from the graph; they are refused unless a budget can leave them whole."""
    if run.followed is not None and part_of(run.steps, Units) is None:
        return ()  # the plan is validated when the graph is shrunk
    rehearsed = rehearse(reference.path, run.model.groups or run.model.sites)
    if any(step.needs_heads for step in run.steps) and not any(step.prunes_groups for step in run.steps):
        require_complete(rehearsed)
    return rehearsed.refused


def walk(run: RunContext, whole: Graphs | None = None) -> State:
    """Carry out the steps of a run, one after the other; the model has the weights of the last state afterwards.

    Every process of a distributed run walks the same list. A step that does not run in parallel is carried out by the
    main process, and the workers read its result from the store.

    Raises:
        CompressorError: a step cannot be carried out; no step has changed anything if it could be foreseen.
    """
    context, model = StepContext(run, whole), run.model.folder.access
    learns = not all(isinstance(step, Follow) for step in run.steps)

    def rehearse_steps() -> None:
        for number, step in enumerate(run.steps):
            functions_of(step).rehearse(step, context, run.steps[:number])

    by_main(run.state, rehearse_steps)
    stores = tuple(step_store(step, run.work.learning / step.name) for step in run.steps)
    if learns:  # a plan that is followed alone needs no rows, and leaves nothing to resume
        stores, notes = open_stores(run.steps, run.recipe, run.model, run.rows, run.work.learning, run.state)
        run.log.add_notes(notes)
    original = weight_fingerprints(model)
    state = State(whole_plan(run.model))
    for step, store in zip(run.steps, stores, strict=True):
        state = _carry_out(step, replace(state, rungs=None), context, store)

    def recorded(load: Callable[[], State]) -> State:
        """A state with a record of the weights of the model, if they were trained."""
        state = load()
        if not (state.selected.trained and learns):
            return state
        plan = record_weights(state.selected.plan, original, model)
        return replace(state, selected=replace(state.selected, plan=plan))

    last, rungs = recorded(lambda: state), state.rungs
    if rungs is None:
        return last
    milder = {name: partial(recorded, load) for name, load in rungs.milder.items()}
    return replace(last, rungs=replace(rungs, milder=milder))


def _carry_out(step: Step, state: State, context: StepContext, store: Store) -> State:
    """The state after a step, which every process has."""
    run, results = context.run, list[State]()

    def carry_out() -> None:
        results.append(functions_of(step).run(step, state, context, store))

    if step.is_parallel:
        carry_out()
        run.state.wait_for_everyone()
    else:
        by_main(run.state, carry_out)
    return results[0] if results else stored_state(store, run.model.folder.access)
