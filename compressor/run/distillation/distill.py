"""Train the compressed model on the outputs of a whole one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel

from compressor.config.sections import AUTO, EngineConfig
from compressor.config.steps import Distill
from compressor.environment import int8_instructions
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.model_folder import ModelFolder, example_inputs, fingerprint
from compressor.progress import ProgressCallback
from compressor.results import Note, NoteCode
from compressor.run.distillation.affordable_steps import affordable_length
from compressor.run.distillation.teacher import require_same_interface
from compressor.run.load import load_folder, load_named_folder
from compressor.run.run_context import LoadedModel, RunContext, RunInputs, SelectedPlan
from compressor.selection.options import ScheduleOptions
from compressor.selection.plan_and_curves import joined_curves, training_curves
from compressor.store import Store
from compressor.tasks import Data, Task, task_classes
from compressor.tasks.augmentation import augmented
from compressor.tasks.calibration import draw_rows
from compressor.tasks.scoring import sample_of
from compressor.training.checkpoints import Checkpoints
from compressor.training.distillation import Distillation
from compressor.training.fake_quantization import FULL_RANGE, REDUCED_RANGE, Rounding, fake_quantized
from compressor.training.fit import fit
from compressor.training.precision import native_precision
from compressor.training.processes import process_count, process_state
from compressor.training.trainer import EVALUATION_FACTOR
from compressor.units import compacted
from graph_passes import Plan

_COMPARED_ROWS = 512
"""Number of evaluation rows on which student and teacher are compared, where there are more. Evaluations on all of many
rows would take longer than the steps."""
_REMEDY = "lower the learning rate (--distill-learning-rate)"


def check_distillation(step: Distill, inputs: RunInputs) -> None:
    """Check that the rows can be augmented as requested, and that the teacher can teach the model.

    Raises:
        InputError: the teacher cannot teach this model, or its task cannot be distilled.
        UsageError: the rows of the task are not cut and joined.
    """
    model, task = inputs.model.folder, inputs.rows.eval_task.chooser
    if task.reads_streams:
        raise InputError(
            f"--distill: {model.family} reads a text segment by segment, and its memory differs from the"
            " teacher's; omit --distill",
            code=ErrorCode.UNSUPPORTED_MODEL,
            field="distill",
        )
    if step.augment and task.special_ids is None:
        able = (known.name for known in task_classes() if known.special_ids is not Task.special_ids)
        augmented_tasks = tuple(dict.fromkeys(able))
        raise UsageError(
            f"--augment {step.augment:g}: not available for {task.name}, only for {' and '.join(augmented_tasks)};"
            " omit it",
            code=ErrorCode.CONTRADICTION,
            field="augment",
            value=step.augment,
            task=task.name,
            tasks=augmented_tasks,
        )
    followed = inputs.followed
    if step.teacher is None and followed is not None and _is_compressed(followed.plan, model):
        raise InputError(
            f"--distill: the weights of {inputs.recipe.source.model} belong to its plan, and are not those of the"
            " whole model; name the folder of the whole model (--teacher)",
            code=ErrorCode.MISSING_VALUE,
            field="teacher",
        )
    if step.teacher is None:
        return
    teacher = load_named_folder(inputs.recipe, "teacher", step.teacher)
    require_same_interface(teacher, model, compares_hidden=step.hidden_weight > 0)
    data = inputs.rows
    rows = [data.train[row] for row in range(min(len(data.train), step.batch_size))]
    # The export checks the model itself.
    _loss(step, teacher, task).require_defined_teacher(task.model_inputs(task.collate(rows)))


def _loss(step: Distill, teacher: ModelFolder, task: Task) -> Distillation:
    """The loss of the distillation."""
    task.declare_answers(teacher.model.config)
    return Distillation.of(
        teacher.model,
        task.loss_outputs,
        temperature=step.temperature,
        hidden_weight=step.hidden_weight,
        teacher_precision=native_precision(),
    )


def _is_compressed(plan: Plan, folder: ModelFolder) -> bool:
    """Whether the model has the weights that an earlier run fitted to a plan."""
    return bool(plan.weights) and plan.model == folder.fingerprint


def distill(
    step: Distill, run: RunContext, selected: SelectedPlan, store: Store, on_progress: ProgressCallback
) -> SelectedPlan:
    """Train the units that a plan keeps; the model has the weights of the best evaluation afterwards.

    The teacher is loaded afresh. Under `accelerate launch` every process calls this.

    Args:
        step: teacher, loss and schedule.
        run: the model, with the weights of the plan, and the rows, whose labels only score the evaluation rows.
        selected: the plan.
        store: keeps unfinished work: checkpoints, the length of the training, and outputs of the teacher.
        on_progress: called with (step, steps).

    Raises:
        DivergedError: see `fit`.
    """
    network, data = run.model.folder.model, run.rows.with_task(run.rows.eval_task.chooser)
    precision = rounded_precision(step, run.recipe.engine, selected)
    path = run.recipe.source.model if step.teacher is None else step.teacher
    distillation = _loss(step, load_folder(run.recipe, path), data.task)
    training = _train(step, run.model, data, selected.plan, precision, distillation, store, on_progress)
    network.to("cpu")  # type: ignore[arg-type]
    points = training_curves(training.log, data.task.metric if data.scores_eval else None)
    return replace(
        selected,
        plan=selected.plan.model_copy(update={"model": fingerprint(network)}),
        curves=joined_curves(selected.curves, points),
        trained=True,
        notes=(*selected.notes, *_notes(step, training)),
    )


@dataclass(frozen=True)
class _Training:
    """A finished training.

    Attributes:
        log: its entries, each with its step.
        steps: number of steps.
        compared: number of evaluation rows on which the model is compared with its teacher.
        before: mean divergence from the teacher on these rows, with the weights before.
        after: the least mean divergence of a checkpoint.
        refusal: why the teacher's outputs could not be kept; None: they were, or did not need to be.
    """

    log: Sequence[Mapping[str, Any]]
    steps: int
    compared: int
    before: float
    after: float
    refusal: str | None


def _train(
    step: Distill,
    model: LoadedModel,
    data: Data,
    plan: Plan,
    precision: str,
    distillation: Distillation,
    store: Store,
    on_progress: ProgressCallback,
) -> _Training:
    """Train the kept units in place; the model has the weights of least divergence, which may be those before.

    In the last steps linears round to `precision`, if any.
    """
    network = model.folder.model
    with compacted(network, plan, example_inputs(model.folder, 2, 8)):
        for member in (network, distillation.teacher):  # what comes before the first step is computed there too
            member.to(process_state().device)
        compared = sample_of(data.task, data.eval, _COMPARED_ROWS, step.seed)
        distillation = distillation.with_variance_of(data.task, compared)
        evaluate = partial(_mean_divergence, distillation, network, replace(data, eval=compared), step, precision)
        before = evaluate()
        length = affordable_length(step, data, distillation, network, store, evaluate)
        steps = length.steps
        schedule = ScheduleOptions(evaluations=length.evaluations).schedule(step, steps)
        drawn = draw_rows(data, steps * step.batch_size * process_count(), step.seed)
        # Lengths of training rows follow those of all evaluation rows.
        data = replace(data, train=_training_rows(step, data, drawn), eval=compared)
        distillation, refusal = _with_kept_outputs(step, data, steps, distillation, store)
        rounding = _rounding(step, steps, precision)
        start = copy.deepcopy(network.state_dict())
        checkpoints = Checkpoints(store.path / "checkpoints", {"plan": plan.model_dump_json()})
        try:
            log = fit(
                network,
                data,
                schedule,
                checkpoints,
                distillation=distillation,
                rounding=rounding,
                on_progress=on_progress,
                remedy=_REMEDY,
            )
        finally:
            if distillation.kept is not None:
                distillation.kept.close()
        first = 0 if rounding is None else rounding.first_step
        after = min(entry["eval_divergence"] for entry in log if "eval_divergence" in entry and entry["step"] >= first)
        if before <= after:
            network.load_state_dict(start)
    if distillation.kept is not None:
        refusal = distillation.kept.refusal
    return _Training(log, steps, len(compared), before, after, refusal)


def _training_rows(step: Distill, data: Data, drawn: Sequence[int]) -> Dataset:
    """The drawn rows, of which a share is cut and joined."""
    rows, share, special_ids = data.train.select(sorted(drawn)), step.augment, data.task.special_ids
    if not share or special_ids is None:
        return rows
    return augmented(rows, data.eval if len(data.eval) else rows, share, step.seed, special_ids)


def _with_kept_outputs(
    step: Distill, data: Data, steps: int, distillation: Distillation, store: Store
) -> tuple[Distillation, str | None]:
    """The distillation, with the teacher's outputs kept where rows are read again, in this run or in others.

    Returns:
        The distillation; and why outputs that are read again cannot be kept.
    """
    folder = step.teacher_outputs
    if folder is None and steps * step.batch_size < 2 * len(data.train):
        return distillation, None
    if process_count() > 1:
        return distillation, f"{process_count()} processes train, and only one can write the file"
    teacher = folder or store.path / "teacher"
    return distillation.keep_outputs(teacher, *data.task.input_counts(data.train)), None


def rounded_precision(step: Distill, engine: EngineConfig, selected: SelectedPlan) -> str:
    """The precision to which linears round in the last steps: that of the engine that is delivered; empty: none.

    Where the engine is chosen after the training, it is int8.
    """
    if not step.quantized_share:
        return ""
    precision: str = engine.precision
    if precision == AUTO:
        precision = selected.engine.split()[1] if selected.engine else "int8"
    return precision if precision in ("int8", "bf16") else ""


def _rounding(step: Distill, steps: int, precision: str) -> Rounding | None:
    """How linears round in the last steps, as they will in the engine of this machine."""
    share = step.quantized_share
    return Rounding(steps - max(1, round(share * steps)), weight_levels(precision)) if precision else None


def weight_levels(precision: str) -> int | None:
    """The levels to which weights round in the quantized graph of this machine; None: they round to bfloat16."""
    if precision == "bf16":
        return None
    return FULL_RANGE if int8_instructions() else REDUCED_RANGE


def _mean_divergence(
    distillation: Distillation, network: PreTrainedModel, data: Data, step: Distill, precision: str
) -> float:
    """The mean divergence of the model's outputs from the teacher's on the evaluation rows, rounded as in training.

    The ranges of rounded activations are those of a batch, so that batches are those of the evaluations in training.
    """
    with ExitStack() as undo:
        if precision:
            undo.enter_context(fake_quantized(network.eval(), lambda: True, weight_levels=weight_levels(precision)))
        rows_at_once = EVALUATION_FACTOR * step.batch_size
        return distillation.mean_divergence(network, data.task, data.eval, rows_at_once)


def _notes(step: Distill, training: _Training) -> Iterator[Note]:
    """What the training did, and whether its weights are delivered."""
    text = (
        f"{training.steps} steps on the outputs of {step.teacher or 'the whole model'}, without labels (temperature"
        f" {step.temperature:g}, hidden states with weight {step.hidden_weight:g}); mean divergence on"
        f" {training.compared:,} evaluation rows"
    )
    if training.before <= training.after:
        text = f"{text} {training.before:#.3g} before and at least {training.after:#.3g} after: the weights before stay"
        yield Note(code=NoteCode.DISTILLED_IN_VAIN, text=text)
    else:
        yield Note(code=NoteCode.DISTILLED, text=f"{text} {training.before:#.3g} before, {training.after:#.3g} after")
    if training.refusal is not None:
        text = f"the teacher's outputs were computed in every step, not kept: {training.refusal}"
        yield Note(code=NoteCode.OUTPUTS_NOT_KEPT, text=text)
