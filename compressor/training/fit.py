"""Train a model, alone or together with a gate, on transformers' Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedModel, PrinterCallback

from compressor.errors import DivergedError
from compressor.progress import ProgressCallback, ignore_progress
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.base import Data
from compressor.tasks.segment_streams import Streams, assign_streams
from compressor.training.arguments import training_arguments
from compressor.training.batch_order import row_order
from compressor.training.callbacks import ClipGradients, EvaluationCallback, RunCallback, StepCounter
from compressor.training.checkpoints import Checkpoints, claim, digest, newest
from compressor.training.distillation import Distillation
from compressor.training.evaluation import Evaluation
from compressor.training.fake_quantization import Rounding, fake_quantized
from compressor.training.gated_model import attach_gate, frozen, restore_model_state
from compressor.training.processes import process_state
from compressor.training.schedule import Schedule
from compressor.training.segment_trainer import SegmentTrainer, StreamRows
from compressor.training.trainer import GateTrainer
from compressor.units import Bundles, Site
from compressor.units.gate import Gate

logger = logging.getLogger(__name__)

_REMEDY = "lower the learning rate (--learning-rate) or lengthen its warm-up (--options warmup=0.2)"


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

    Rows are shuffled anew in every epoch. A text that is read in order (`Streams`) is divided into parallel streams
    instead, and the model keeps the memory of earlier segments. Evaluations before the gate has settled do not count.

    Args:
        model: a float32 model.
        data: the model is trained on its training rows; its evaluation rows select the checkpoint.
        schedule: length, optimizer and learning rate.
        checkpoints: the checkpoint folder; an interrupted run with the same settings is resumed from there.
        gating: a gate to train too; None: only the model is trained.
        distillation: trains the model on a teacher's outputs, without labels; the divergence from these on evaluation
            rows then selects the checkpoint. None: it is trained on labels, and the metric selects.
        rounding: the steps in which linears round to 8 bits, also in evaluations; only their checkpoints count. None:
            nothing is rounded.
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
    task, gate = data.task, None if gating is None else gating.gate
    arguments = training_arguments(schedule, task, checkpoints.folder)
    memory_files = arguments.world_size if isinstance(task, Streams) else 0
    trainer_type = _trainer_type(data, schedule, arguments.world_size)
    counter = StepCounter()
    first_step = 0 if rounding is None else rounding.first_step
    evaluation = Evaluation(
        model, task, gate, counter, schedule.steps, by_divergence=distillation is not None, first_step=first_step
    )
    settings = _settings(model, data, schedule, checkpoints, gating, distillation, rounding, arguments.world_size)
    with ExitStack() as contexts:
        with process_state().main_process_first():
            checkpoint = claim(
                checkpoints.folder, settings, refuse_others=checkpoints.refuse_others, memory_files=memory_files
            )
        contexts.enter_context(quiet_transformers())
        contexts.enter_context(restore_model_state(model))
        if gating is not None:
            if not gating.trains_model:
                contexts.enter_context(frozen(model))
            contexts.enter_context(attach_gate(model, gating.gate, gating.groups, lambda: counter.step))
        if rounding is not None:
            levels = rounding.weight_levels
            contexts.enter_context(fake_quantized(model, lambda: counter.step >= first_step, weight_levels=levels))
        trainer = trainer_type(
            gate=gate,
            schedule=schedule,
            task=task,
            distillation=distillation,
            model=model,
            args=arguments,
            data_collator=task.collate,
            compute_metrics=evaluation.metrics,
            preprocess_logits_for_metrics=None if isinstance(task, Streams) else evaluation.row_statistics,
            callbacks=[
                counter,
                ClipGradients(gate, schedule.max_grad_norm),
                RunCallback(gate, task.metric, on_progress, on_evaluation),
            ],
        )
        trainer.remove_callback(PrinterCallback)
        logger.debug("training %d steps from %s", schedule.steps, checkpoint or "the beginning")
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except DivergedError as error:
            raise _with_remedy(error, remedy, newest(checkpoints.folder, memory_files)) from error
    return list(trainer.state.log_history)


def _trainer_type(data: Data, schedule: Schedule, processes: int) -> Callable[..., GateTrainer]:
    """The class of the trainer for the task of `data`, with the rows in the order in which it reads them."""
    train: Dataset[Any]
    if isinstance(data.task, Streams):
        streams = schedule.batch_size * processes
        order = assign_streams(len(data.train), streams, whole=False)
        train = StreamRows(data.train, np.resize(order, (schedule.steps, streams)).ravel().tolist())
        evaluated = StreamRows(data.eval, assign_streams(len(data.eval), streams, whole=True).ravel().tolist())
        return partial(SegmentTrainer, pass_steps=len(order), train_dataset=train, eval_dataset=evaluated)
    # Processes share each batch, so that several read the rows of one with a batch as large as theirs together.
    rows = row_order(data.train["length"], schedule.batch_size * processes, schedule.steps, schedule.seed)
    by_length = np.argsort(data.eval["length"], kind="stable").tolist()
    return partial(GateTrainer, train_dataset=Subset(data.train, rows), eval_dataset=Subset(data.eval, by_length))


def _settings(
    model: PreTrainedModel,
    data: Data,
    schedule: Schedule,
    checkpoints: Checkpoints,
    gating: GateSetup | None,
    distillation: Distillation | None,
    rounding: Rounding | None,
    processes: int,
) -> dict[str, Any]:
    """Everything that determines a run; checkpoints with other settings are not resumed."""
    return {
        **checkpoints.settings,
        "schedule": asdict(schedule),
        "gate": None if gating is None else type(gating.gate).__name__,
        "trains_model": gating is None or gating.trains_model,
        **({} if distillation is None else {"teacher": distillation.settings}),
        **({} if rounding is None else {"rounding": asdict(rounding)}),
        "processes": processes,
        "rows": [data.train_hash, data.eval_hash],
        "start": [digest(model), *([] if gating is None else [digest(gating.gate)])],
    }


def _with_remedy(error: DivergedError, remedy: str, checkpoint: Path | None) -> DivergedError:
    """The error with its remedy and the last checkpoint before it."""
    last = f"the last good checkpoint is {checkpoint.name}" if checkpoint else "there is no checkpoint yet"
    return DivergedError(f"{error}; {remedy}; {last}", code=error.code, **error.details, checkpoint=checkpoint)
