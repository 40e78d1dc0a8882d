"""Load what a run reads, and check every step against it before anything is exported."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from accelerate import PartialState

from compressor.block_masks.attention_timer import find_attention_extras
from compressor.block_masks.mask_selector import MaskSelector
from compressor.config.run import Recipe
from compressor.config.step_list import steps_of
from compressor.config.steps import Step, Units
from compressor.config.unused_flags import nothing_learned_note, order_notes, unused_field_notes
from compressor.engines.matmul_times import MatmulTimes
from compressor.model_folder import example_feeds_by_size, example_inputs
from compressor.model_folder.example_inputs import token_limit
from compressor.progress import RunLog
from compressor.run import run_notes
from compressor.run.load import load_folder, load_model, missing_target, read_rows, with_point, with_row_layout
from compressor.run.plan_source import load_plan, on_first_model
from compressor.run.run_context import RunContext, RunInputs, RunSizes
from compressor.run.sizes import work_out_sizes
from compressor.run.steps.registry import functions_of
from compressor.selection.checks import check_every_option
from compressor.targets import DEFAULT_TARGET
from compressor.workdir import WorkDir

_COPIES = 4
"""Minimum number of graphs of the model's size that are on the disk at the same time."""


def load_context(
    recipe: Recipe, work: WorkDir, log: RunLog, state: PartialState, later: Sequence[Recipe] = ()
) -> RunContext:
    """Load the model, the rows and the plan to follow, check the steps, and work out the sizes.

    Args:
        recipe: the settings and steps of the run.
        work: the folder of the run, in which disk space is reserved.
        log: receives stages and notes.
        state: the processes of the run, all of which call this.
        later: recipes of later rungs on the same model and rows; `next_rung` begins them.

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
            work.reserve(_COPIES * sum(weight.nbytes for weight in model.folder.model.state_dict().values()))
    if model.missing is not None:
        log.add_notes([run_notes.missing_target_note(model.missing)])
    data = None
    if recipe.rows.available:
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
    """A rung after others of the same run: the model has the weights of its folder again.

    Args:
        run: the run, as `load_context` returned it.
        recipe: the recipe of the rung.
        work: the folder of the rung.
        log: receives stages and notes of the rung.
    """
    run.state.wait_for_everyone()  # the main process delivers the rung before, on which the key of this one depends
    run.model.folder.model.load_state_dict(load_folder(recipe, recipe.source.model).model.state_dict())
    missing = run.model.missing
    model = replace(run.model, missing=missing and missing_target(recipe, missing.reason))
    built = _built(recipe, has_target=missing is None)
    return replace(run, recipe=recipe, steps=steps_of(recipe), model=model, built=built, work=work, log=log)


def _steps_before_start(recipe: Recipe) -> tuple[Step, ...]:
    """The steps of a later rung without the folder that it goes on from, which does not exist yet."""
    steps = steps_of(recipe)
    return tuple(step.model_copy(update={"start_from": None}) if isinstance(step, Units) else step for step in steps)


def _mask_selector(inputs: RunInputs, sizes: RunSizes) -> MaskSelector:
    """The selector of masks, which times the forms of masked attention at the sizes of the run."""
    recipe, model, extras = inputs.recipe, inputs.model, {}
    if sizes.mask_reach is not None:
        extras = find_attention_extras(model.folder.model, example_inputs(model.folder, 2, 8))
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
