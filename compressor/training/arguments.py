"""The arguments of transformers' Trainer for a schedule."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import TrainingArguments

from compressor.tasks.base import Task
from compressor.training.schedule import Schedule

SELECTION_METRIC = "chosen"
"""Name under which an evaluation reports the number that selects the best checkpoint; larger is better."""
EVALUATION_FACTOR = 4
"""Size of an evaluation batch as a multiple of a training batch; evaluation stores no gradients."""


def training_arguments(schedule: Schedule, task: Task, folder: Path) -> TrainingArguments:
    """Arguments of the trainer, on one device per process.

    Args:
        schedule: length, optimizer and learning rate.
        task: determines the label name and the size of evaluation batches.
        folder: folder of the checkpoints.
    """
    evaluation_steps = max(1, schedule.steps // schedule.evaluations)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=schedule.steps,
        per_device_train_batch_size=schedule.batch_size,
        per_device_eval_batch_size=schedule.batch_size * (1 if task.reads_streams else EVALUATION_FACTOR),
        learning_rate=schedule.learning_rate,
        weight_decay=schedule.weight_decay,
        max_grad_norm=0.0,  # `ClipGradients` clips the gradients of model and gate separately
        seed=schedule.seed % 2**32,  # the range of NumPy's seeds
        use_cpu=not torch.cuda.is_available(),
        bf16=schedule.mixed_precision == "bf16",
        train_sampling_strategy="sequential",
        logging_steps=_logging_steps(schedule, evaluation_steps),
        eval_strategy="steps",
        eval_steps=evaluation_steps,
        save_steps=evaluation_steps,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model=f"eval_{SELECTION_METRIC}",
        greater_is_better=True,
        remove_unused_columns=False,
        label_names=[task.label_name],
        # The trainer would multiply the loss by the number of processes, but not the penalty of a gate.
        average_tokens_across_devices=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
    )
    use_one_device(arguments)
    return arguments


def use_one_device(arguments: TrainingArguments) -> None:
    """Restrict the trainer to one GPU; `accelerate launch` assigns one to each process.

    Otherwise the trainer would split larger batches over all visible GPUs, and streams would be read with the memories
    of other streams.
    """
    arguments._n_gpu = min(arguments.n_gpu, 1)


def _logging_steps(schedule: Schedule, evaluation_steps: int) -> int:
    """Steps between points of the curves: a divisor of `evaluation_steps`, so that every evaluation is at a point."""
    maximum = max(1, schedule.steps // schedule.points)
    return next(steps for steps in range(maximum, 0, -1) if evaluation_steps % steps == 0)
