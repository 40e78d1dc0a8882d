"""Train what is left of the model on the outputs of a whole one."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel

from compressor.config.sections import AUTO, EngineConfig
from compressor.config.steps import Distill, Step
from compressor.environment import int8_instructions
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.model_folder import ModelFolder, example_inputs
from compressor.model_folder.processor import image_settings
from compressor.models.forwards import tensors_of
from compressor.models.pooled_encoder import SentenceEncoder
from compressor.processes import process_count, training_device
from compressor.progress import ProgressCallback
from compressor.results import Note, NoteCode
from compressor.run.load import load_folder, load_named_folder
from compressor.run.plan_source import PlanFiles
from compressor.run.run_context import RunContext, RunInputs
from compressor.run.steps.base import PLAN, State, StepContext, StepFunctions
from compressor.selection.options import ScheduleOptions
from compressor.selection.plan_and_curves import SelectedPlan, joined_curves, training_curves
from compressor.store import Json, Store, versioned
from compressor.tasks import Data, Task
from compressor.tasks.augmentation import extended
from compressor.tasks.calibration import compared_rows, draw_rows
from compressor.tasks.scoring import sample_of
from compressor.training.checkpoints import Checkpoints
from compressor.training.distillation import Distillation
from compressor.training.fake_quantization import FULL_RANGE, REDUCED_RANGE, Rounding, fake_quantized
from compressor.training.fit import fit
from compressor.training.precision import usable_precision
from compressor.training.trainer import EVALUATION_FACTOR
from compressor.units import compacted
from compressor.units.layers import embedding_tables, gradients_of, is_linear

_COMPARED_ROWS = 512
"""Number of evaluation rows on which student and teacher are compared, where there are more. Evaluations on all of many
rows would take longer than the steps."""
_TIMED_STEPS = 5
_EVALUATIONS = ScheduleOptions().evaluations
_EVALUATED_SHARE = 0.1
"""Share of the minutes that evaluations take at most; where they would take more, fewer are made."""
_READS = 2
"""How often a training reads a row at most where further rows can be made. The teacher, which takes a third of a step,
computes the outputs of a row once."""
_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
"""Fields of configurations with the number of layers of a decoder."""
_TOKENIZER_PARTS = ("normalizer", "pre_tokenizer", "model", "post_processor")
"""Keys of `tokenizer.json` that decide which tokens a text becomes."""
_REMEDY = "lower the learning rate (--distill-learning-rate)"


def _check(step: Distill, inputs: RunInputs, earlier: Sequence[Step]) -> None:
    """Raise unless the teacher can teach the model."""
    model, task = inputs.model.folder, inputs.rows.eval_task.chooser
    if task.reads_streams:
        raise InputError(
            f"--distill: {model.family} reads a text segment by segment, and its memory differs from the"
            " teacher's; omit --distill",
            code=ErrorCode.UNSUPPORTED_MODEL,
            field="distill",
        )
    if step.teacher is None:
        plan = None if inputs.followed is None else inputs.followed.plan
        # The model has the weights that an earlier run fitted to the plan.
        if plan is not None and plan.weights and plan.model == model.fingerprint:
            raise InputError(
                f"--distill: the weights of {inputs.recipe.source.model} belong to its plan, and are not those of the"
                " whole model; name the folder of the whole model (--teacher)",
                code=ErrorCode.MISSING_VALUE,
                field="teacher",
            )
        return
    teacher = load_named_folder(inputs.recipe, "teacher", step.teacher)
    require_same_interface(teacher, model, compares_hidden=step.hidden_weight > 0)
    data = inputs.rows
    # The export checks the model itself.
    inputs_of_teacher = _first_inputs(step, task, data)
    _loss(step, teacher, task, inputs_of_teacher).require_defined_teacher(inputs_of_teacher)


def _loss(step: Distill, teacher: ModelFolder, task: Task, inputs: Mapping[str, torch.Tensor]) -> Distillation:
    """The loss of the distillation, in the precision in which the teacher runs on some inputs where it is."""
    task.declare_answers(teacher.model.config)
    return Distillation.of(
        teacher.network,
        task.loss_outputs,
        temperature=step.temperature,
        hidden_weight=step.hidden_weight,
        precision=usable_precision(teacher.network, inputs),
    )


@versioned(4, "compressor.training", "compressor.tasks.augmentation")
def _run(step: Distill, state: State, context: StepContext, store: Store) -> State:
    """The plan, whose units the model has with trained weights."""
    run = context.run

    def train(work: Path) -> SelectedPlan:
        with run.log.stage("training on the outputs of the whole model") as on_progress:
            return _train(step, run, state.selected, store.within(work), on_progress)

    return replace(state, selected=store.memo(PLAN, {}, train, PlanFiles(run.model.folder.access)))


def _train(
    step: Distill, run: RunContext, selected: SelectedPlan, store: Store, on_progress: ProgressCallback
) -> SelectedPlan:
    """Train the units that a plan keeps; the model has the weights of least divergence, which may be those before.

    The teacher is loaded afresh. In the last steps linears round to the precision of the engine, if any. Under
    `accelerate launch` every process calls this.
    """
    network, whole = run.model.folder.network, run.rows.with_task(run.rows.eval_task.chooser)
    precision = rounded_precision(step, run.recipe.engine, selected)
    path = run.recipe.source.model if step.teacher is None else step.teacher
    teacher = load_folder(run.recipe, path)
    teacher.network.to(training_device())  # type: ignore[arg-type]
    distillation = _loss(step, teacher, whole.task, _first_inputs(step, whole.task, whole))
    with ExitStack() as contexts:
        contexts.enter_context(compacted(network, selected.plan, example_inputs(run.model.folder, 2, 8)))
        contexts.enter_context(gradients_of(_shared_tables(network, distillation.teacher), required=False))
        members: tuple[nn.Module, ...] = (network, distillation.teacher)
        for member in members:  # what comes before the first step is computed there too
            member.to(training_device())
        rows = compared_rows(whole.task, whole.eval, _COMPARED_ROWS)
        compared = sample_of(whole.task, whole.eval, rows, step.seed)
        distillation = distillation.with_variance_of(whole.task, compared)
        evaluate = partial(_mean_divergence, distillation, network, replace(whole, eval=compared), step, precision)
        before = evaluate()
        length = affordable_length(step, whole, distillation, network, store, evaluate)
        steps = length.steps
        # Lengths of training rows follow those of all evaluation rows.
        train = _training_rows(whole, steps * step.batch_size * process_count(), step.seed)
        data = replace(whole, train=train, eval=compared)
        if step.teacher_outputs is not None or steps * step.batch_size >= 2 * len(train):
            # Rows are read again, in this run or in others.
            distillation = _keeping(step, distillation, store, *data.task.input_counts(train))
        rounding = None  # in the last steps linears round as they will in the engine of this machine
        if precision:
            rounding = Rounding(steps - max(1, round(step.quantized_share * steps)), weight_levels(precision))
        start = copy.deepcopy(network.state_dict())
        try:
            log = fit(
                network,
                data,
                ScheduleOptions(evaluations=length.evaluations).schedule(step, steps),
                Checkpoints(store.path / "checkpoints", {"plan": selected.plan.model_dump_json()}),
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
    network.to("cpu")  # type: ignore[arg-type]
    points = training_curves(log, whole.task.metric if whole.scores_eval else None)
    return replace(
        selected,
        plan=selected.plan.model_copy(update={"model": run.model.folder.access.fingerprint()}),
        curves=joined_curves(selected.curves, points),
        trained=True,
        notes=(*selected.notes, *_notes(step, steps, distillation, len(compared), before, after)),
    )


def _shared_tables(student: nn.Module, teacher: nn.Module) -> list[nn.Parameter]:
    """The embedding tables of a student that equal those of its teacher and are no weights of a head too.

    They need no training, have most of the weights of a small model, and an optimizer would update them in every step.
    """
    pairs = zip(embedding_tables(student), embedding_tables(teacher), strict=False)
    heads = {id(module.weight) for module in student.modules() if is_linear(module)}
    return [
        table
        for table, taught in pairs
        if id(table) not in heads and table.shape == taught.shape and torch.equal(table, taught)
    ]


def _notes(
    step: Distill, steps: int, distillation: Distillation, rows: int, before: float, after: float
) -> Iterator[Note]:
    """What the training was and how far the model is from the teacher, and why outputs were not kept."""
    text = (
        f"{steps} steps on the outputs of {step.teacher or 'the whole model'}, without labels (temperature"
        f" {step.temperature:g}, hidden states with weight {step.hidden_weight:g}); mean divergence on"
        f" {rows:,} evaluation rows {before:#.3g} before"
    )
    if before <= after:
        text += f" and at least {after:#.3g} after: the weights before stay"
        yield Note(code=NoteCode.DISTILLED_IN_VAIN, text=text)
    else:
        yield Note(code=NoteCode.DISTILLED, text=f"{text}, {after:#.3g} after")
    if distillation.kept is not None and distillation.kept.refusal is not None:
        text = f"the teacher's outputs were computed in every step, not kept: {distillation.kept.refusal}"
        yield Note(code=NoteCode.OUTPUTS_NOT_KEPT, text=text)


def _training_rows(data: Data, count: int, seed: int) -> Dataset:
    """The rows of a training that reads a number of rows; where there are few, further ones are made of them."""
    rows, vocabulary = data.train.select(sorted(draw_rows(data, count, seed))), data.task.vocabulary
    if vocabulary is None or (needed := count // _READS) <= len(rows):
        return rows
    return extended(rows, data.eval if len(data.eval) else rows, needed, seed, vocabulary)


def _keeping(step: Distill, distillation: Distillation, store: Store, rows: int, tokens: int) -> Distillation:
    """The distillation, which keeps the teacher's outputs of training rows that have a number of tokens together."""
    folder = step.teacher_outputs or store.path / "teacher"
    return distillation.keep_outputs(folder, rows, tokens)


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


@dataclass(frozen=True)
class TrainingLength:
    """The length of a training.

    Attributes:
        steps: number of steps.
        evaluations: number of evaluations, each of which writes a checkpoint.
    """

    steps: int
    evaluations: int = _EVALUATIONS


def affordable_length(
    step: Distill,
    data: Data,
    distillation: Distillation,
    network: PreTrainedModel,
    store: Store,
    evaluate: Callable[[], object],
) -> TrainingLength:
    """The length of the distillation: as configured, or as many steps as its minutes allow beside the evaluations.

    The times of an evaluation and of a step, with and without rounding, are measured once, and the length is stored,
    so that an interrupted run makes as many.

    Raises:
        UsageError: the minutes do not suffice for one step and one evaluation.
    """
    minutes = step.minutes
    if minutes is None:
        return TrainingLength(step.training_steps)

    def can_keep(steps: int) -> bool:
        rows, tokens = data.task.input_counts(data.train)
        further = 0 if data.task.vocabulary is None else max(0, steps * step.batch_size // _READS - rows)
        lengths = data.eval["length"][:] if further and len(data.eval) else data.train["length"][:]
        counts = rows + further, tokens + math.ceil(further * np.mean(lengths))
        kept = _keeping(step, distillation, store, *counts).kept
        return kept is not None and kept.obstacle(_first_inputs(step, data.task, data)) is None

    def measure(_: Path) -> TrainingLength:
        available, (seconds, teaching) = 60 * minutes, _step_seconds(step, data, distillation, network)
        start = time.perf_counter()
        evaluate()
        evaluation_seconds = time.perf_counter() - start
        # At least one, and no more than leave time for a step.
        times = (_EVALUATED_SHARE * available, available - seconds - teaching)
        evaluations = max(1, min(_EVALUATIONS, *(int(time_left / evaluation_seconds) for time_left in times)))
        left = available - evaluations * evaluation_seconds
        affordable = int(left / (seconds + teaching))
        # Where rows are read twice or more, the teacher computes the outputs of each once, and they are kept.
        passes, reads = len(data.train) / step.batch_size, math.inf if data.task.vocabulary is None else _READS
        with_kept = int(min((left - teaching * passes) / seconds, left / (seconds + teaching / reads)))
        affordable, with_kept = (min(step.training_steps, steps) for steps in (affordable, with_kept))
        if with_kept >= 2 * passes and can_keep(with_kept):
            affordable = with_kept
        if affordable < 1:
            raise UsageError(
                f"--minutes {minutes:g}: one step of the distillation takes {seconds + teaching:.2g} s and an"
                f" evaluation {evaluation_seconds:.2g} s; allow more time, or fewer rows a step (--batch-size)",
                code=ErrorCode.OUT_OF_RANGE,
                field="minutes",
                value=minutes,
            )
        return TrainingLength(affordable, evaluations)

    return store.memo("length", {}, measure, Json(TrainingLength), by_main=True)


def _inputs_of(task: Task, rows: Dataset, batch: Iterable[int]) -> dict[str, torch.Tensor]:
    """The inputs of a batch of rows."""
    return tensors_of(task.model_inputs(task.collate([rows[int(row)] for row in batch])))


def _first_inputs(step: Distill, task: Task, data: Data) -> dict[str, torch.Tensor]:
    """The inputs of the first training rows, as many as a step reads."""
    return _inputs_of(task, data.train, range(min(len(data.train), step.batch_size)))


def _step_seconds(
    step: Distill, data: Data, distillation: Distillation, network: PreTrainedModel
) -> tuple[float, float]:
    """Mean seconds of a step over a training, in whose last steps linears round to 8 bits, and of the teacher in it.

    The first number is without the second.
    """
    share = step.quantized_share
    times = np.zeros(2)
    for rounds, part in ((False, 1 - share), (True, share)):
        if part:
            with fake_quantized(network, partial(bool, rounds)):
                times += part * _timed_seconds(step, data, distillation, network)
    seconds, teaching = times.tolist()
    return seconds, teaching


def _timed_seconds(step: Distill, data: Data, distillation: Distillation, network: PreTrainedModel) -> np.ndarray:
    """Mean seconds of a few training steps and of the teacher before them, after a first step for warm-up.

    The steps read rows of similar lengths, as those of a training do, from the shortest to the longest that it reads.
    Weights keep their values.
    """
    rows, count = data.eval, step.training_steps * step.batch_size
    if data.task.vocabulary is None or count // _READS <= 2 * len(data.train) or not len(rows):
        rows = data.train.select(draw_rows(data, count, step.seed))  # else most have the lengths of evaluation rows
    order = np.argsort(rows["length"][:], kind="stable")
    starts = np.linspace(0, max(0, len(rows) - step.batch_size), _TIMED_STEPS).astype(int)
    # Steps of a training are of full batches, of repeated rows where there are few.
    batches = [np.resize(order[start : start + step.batch_size], step.batch_size) for start in starts]
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True)
    times = []
    for batch in (batches[0], *batches):
        inputs, start = _inputs_of(data.task, rows, batch), time.perf_counter()
        target = distillation.teach(inputs)
        for output in target.values():
            output.flatten()[:1].tolist()  # a GPU computes on after the call
        taught = time.perf_counter()
        loss = distillation.loss(network, inputs, target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, math.inf)
        if torch.isfinite(norm):  # else a step makes weights NaN, even at a rate of zero
            optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append((time.perf_counter() - taught, taught - start))
    return np.mean(times[1:], axis=0)


def require_same_interface(teacher: ModelFolder, student: ModelFolder, *, compares_hidden: bool) -> None:
    """Raise unless a teacher has the tokens and labels of the student, and layers that correspond to its own."""

    def refuse(difference: str, code: ErrorCode = ErrorCode.FILE_MISMATCH, **details: Any) -> InputError:
        text = f"{difference}; choose another teacher (--teacher), or omit it to learn from the model itself"
        return InputError.of_file(teacher.path, text, code, field="teacher", **details)

    def differs(read: Callable[[ModelFolder], object]) -> bool:
        return read(teacher) != read(student)

    if differs(_vocabulary):
        raise refuse("its tokenizer has another vocabulary than that of the model")
    if (part := differing_tokenizer_part(teacher.processor, student.processor)) is not None:
        text = f"its tokenizer splits texts otherwise than that of the model (the {part} of tokenizer.json differs)"
        raise refuse(text, part=part)
    if differs(lambda folder: None if folder.image_size is None else image_settings(folder.processor)):
        raise refuse("its image processor makes other pixels than that of the model")
    if differs(lambda folder: (folder.config.num_labels, folder.task)):
        raise refuse("its task or its labels are not those of the model", ErrorCode.LABEL_MISMATCH)
    if differs(lambda folder: getattr(folder.config, "id2label", None)):
        raise refuse("its labels are not those of the model", ErrorCode.LABEL_MISMATCH)
    networks = [folder.network for folder in (teacher, student)]
    widths = [network.width for network in networks if isinstance(network, SentenceEncoder)]
    if len(set(widths)) > 1:
        raise refuse(f"its embeddings have the width {widths[0]}, those of the model {widths[1]}")
    names = ("num_hidden_layers", "hidden_size", *_DECODER_LAYERS)
    first, second = ([getattr(folder.config, name, None) for name in names] for folder in (teacher, student))
    if compares_hidden and first != second:
        raise refuse(
            f"it has {first[0]} layers of width {first[1]}, the model {second[0]} of {second[1]}, or their decoders"
            " differ, so hidden states cannot be compared (--hidden-weight 0 learns the outputs alone)"
        )


def _vocabulary(folder: ModelFolder) -> object:
    """The tokens and their ids; None for a model without a tokenizer."""
    vocabulary = getattr(folder.processor, "get_vocab", None)
    return None if vocabulary is None else vocabulary()


def differing_tokenizer_part(first: Any, second: Any) -> str | None:
    """The first part of two fast tokenizers by which equal texts become different tokens; None: there is none.

    Truncation and padding are not compared: they change whenever texts are encoded. Slow tokenizers have no parts.
    """
    processors = (first, second)
    if not all(hasattr(processor, "backend_tokenizer") for processor in processors):
        return None
    parts = [json.loads(processor.backend_tokenizer.to_str()) for processor in processors]
    return next((name for name in _TOKENIZER_PARTS if parts[0].get(name) != parts[1].get(name)), None)


FUNCTIONS = StepFunctions(_run, check=_check)
