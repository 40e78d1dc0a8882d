"""Train a model, alone or together with a gate, on transformers' Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedModel, PrinterCallback

from compressor.errors import DivergedError
from compressor.models.forwards import tensors_of
from compressor.processes import process_state
from compressor.progress import ProgressCallback, ignore_progress
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.causal_lm import assign_streams
from compressor.tasks.data import Data
from compressor.tasks.scoring import indices_by_length
from compressor.training.callbacks import ClipGradients, EvaluationCallback, RunCallback, StepCounter
from compressor.training.checkpoints import Checkpoints, claim, digest, newest_checkpoint
from compressor.training.distillation import Distillation
from compressor.training.fake_quantization import Rounding, fake_quantized
from compressor.training.gated_model import attach_gate, frozen, restore_model_state, restored_generators
from compressor.training.schedule import Schedule
from compressor.training.trainer import Evaluation, GateTrainer, SegmentTrainer, StreamRows, training_arguments
from compressor.units import Bundles, Site
from compressor.units.gate import Gate

logger = logging.getLogger(__name__)

_REMEDY = "lower the learning rate (--learning-rate) or lengthen its warm-up (--options warmup=0.2)"

_POOL = 50
"""Batches per pool, in which rows are sorted by length: many save padding, few keep the order random."""


@dataclass(frozen=True)
class GateSetup:
    """A gate to train together with a model.

    Attributes:
        gate: one multiplier per unit of `groups`.
        groups: sites, or groups of units in bundles; see `attach_gate`.
        trains_model: False freezes the model, with dropout on, so that only the gate is trained.
    """

    gate: Gate
    groups: Sequence[Site | Bundles]
    trains_model: bool = True


def fit(
    model: PreTrainedModel,
    data: Data,
    schedule: Schedule,
    checkpoints: Checkpoints,
    *,
    gating: GateSetup | None = None,
    distillation: Distillation | None = None,
    rounding: Rounding | None = None,
    on_progress: ProgressCallback = ignore_progress,
    on_evaluation: EvaluationCallback | None = None,
    remedy: str = _REMEDY,
) -> list[dict[str, Any]]:
    """Train `model`, and a gate if there is one, in place; both end with the weights of the best evaluation.

    Rows are shuffled anew in every epoch. A text that is read in order (`Task.reads_streams`) is divided into
    parallel streams instead, and the model keeps the memory of earlier segments. Evaluations before the gate has
    settled do not count.

    Args:
        model: a float32 model.
        data: the model is trained on its training rows; its evaluation rows select the checkpoint.
        checkpoints: the checkpoint folder; an interrupted run with the same settings is resumed from there.
        gating: a gate to train too; None: only the model is trained.
        distillation: trains on a teacher's outputs, the divergence from which selects the checkpoint; None: on labels.
        rounding: when linears round as in the engine; only checkpoints of these steps count. None: they never round.
        on_progress: called with (step, steps) after every step.
        on_evaluation: called with (step, metric) after every evaluation.
        remedy: how to prevent a divergence, in terms of the command's flags, for the error message.

    Returns:
        The log: one dictionary per entry, each with its `step`.

    Raises:
        DivergedError: the loss, the gradient norm, a weight or the metric is not finite; earlier checkpoints remain.
        InputError: the text has fewer segments than there are streams.
        UsageError: the folder has checkpoints of another run (`Checkpoints.refuse_others`).
    """
    task, gate, counter = data.task, None if gating is None else gating.gate, StepCounter()
    arguments = training_arguments(schedule, task, checkpoints.folder)
    processes = arguments.world_size
    trainer_type = _trainer_type(data, schedule, processes)  # a text that is too short ends the run here
    memory_files = processes if task.reads_streams else 0
    # Everything that determines a run: checkpoints with other settings are not resumed.
    settings = {
        **checkpoints.settings,
        "schedule": asdict(schedule),
        "gate": None if gate is None else type(gate).__name__,
        "trains_model": gating is None or gating.trains_model,
        **({} if distillation is None else {"teacher": distillation.settings}),
        **({} if rounding is None else {"rounding": asdict(rounding)}),
        "processes": processes,
        "rows": [data.train_hash, data.eval_hash],
        "start": [digest(module) for module in (model, gate) if module is not None],
    }
    with process_state().main_process_first():
        checkpoint = claim(
            checkpoints.folder, settings, refuse_others=checkpoints.refuse_others, memory_files=memory_files
        )
    evaluation = Evaluation(
        model,
        task,
        gate,
        counter,
        schedule.steps,
        by_divergence=distillation is not None,
        first_step=0 if rounding is None else rounding.first_step,
    )
    report = RunCallback(gate, task.metric, on_progress, on_evaluation)
    with _attached(model, gating, rounding, counter):
        trainer = trainer_type(
            gate=gate,
            schedule=schedule,
            task=task,
            distillation=distillation,
            model=model,
            args=arguments,
            data_collator=lambda examples: tensors_of(task.collate(examples)),
            compute_metrics=evaluation.metrics,
            preprocess_logits_for_metrics=None if task.reads_streams else evaluation.row_statistics,
            callbacks=[counter, ClipGradients(gate, schedule.max_grad_norm), report],
        )
        trainer.remove_callback(PrinterCallback)
        logger.debug("training %d steps from %s", schedule.steps, checkpoint or "the beginning")
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except DivergedError as error:
            newest = newest_checkpoint(checkpoints.folder, memory_files)
            last = f"the last good checkpoint is {newest.name}" if newest else "there is no checkpoint yet"
            text = f"{error}; {remedy}; {last}"
            raise DivergedError(text, code=error.code, **error.details, checkpoint=newest) from error
    return list(trainer.state.log_history)


@contextmanager
def _attached(
    model: PreTrainedModel, gating: GateSetup | None, rounding: Rounding | None, counter: StepCounter
) -> Iterator[None]:
    """Attach the gate and the rounding to the model, which is as before afterwards, except for its weights."""
    with quiet_transformers(), restored_generators(), restore_model_state(model), ExitStack() as contexts:
        if gating is not None:
            if not gating.trains_model:
                contexts.enter_context(frozen(model))
            contexts.enter_context(attach_gate(model, gating.gate, gating.groups, lambda: counter.step))
        if rounding is not None:
            first, levels = rounding.first_step, rounding.weight_levels
            contexts.enter_context(fake_quantized(model, lambda: counter.step >= first, weight_levels=levels))
        yield


def _trainer_type(data: Data, schedule: Schedule, processes: int) -> Callable[..., GateTrainer]:
    """The class of the trainer for the task of `data`, with the rows in the order in which it reads them."""
    train: Dataset[Any]
    if data.task.reads_streams:
        streams = schedule.batch_size * processes
        order = assign_streams(len(data.train), streams, whole=False)
        train = StreamRows(data.train, np.resize(order, (schedule.steps, streams)).ravel().tolist())
        evaluated = StreamRows(data.eval, assign_streams(len(data.eval), streams, whole=True).ravel().tolist())
        return partial(SegmentTrainer, pass_steps=len(order), train_dataset=train, eval_dataset=evaluated)
    # Processes share each batch: several read the rows that one process would read in a batch of their joint size.
    rows = row_order(data.train["length"][:], schedule.batch_size * processes, schedule.steps, schedule.seed)
    by_length = [row for batch in indices_by_length(data.eval, 1) for row in batch]
    return partial(GateTrainer, train_dataset=Subset(data.train, rows), eval_dataset=Subset(data.eval, by_length))


def row_order(lengths: Sequence[int], batch_size: int, batches: int, seed: int) -> list[int]:
    """Row numbers of `batches` consecutive batches of `batch_size`.

    Every epoch visits each row once in a new random order. Within pools of 50 batches, rows are sorted by length so
    that batches need little padding; the batches of a pool are then shuffled.

    Args:
        lengths: tokens of each row.

    Returns:
        `batches * batch_size` row numbers.
    """
    rng = np.random.default_rng(seed)
    needed = batches * batch_size
    tokens = np.asarray(lengths)
    epochs = [rng.permutation(len(tokens)) for _ in range(-(-needed // len(tokens)))]
    rows = np.concatenate(epochs)[:needed] if epochs else np.empty(0, dtype=int)
    pool = _POOL * batch_size
    grouped = []
    for start in range(0, needed, pool):
        part = rows[start : start + pool]
        part = part[np.argsort(tokens[part], kind="stable")].reshape(-1, batch_size)
        grouped.append(rng.permutation(part).reshape(-1))
    return [int(row) for part in grouped for row in part]
