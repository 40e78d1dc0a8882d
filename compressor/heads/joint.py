"""Joint learning: the model and one gate a head learn together, on transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import Subset
from transformers import EvalPrediction, PreTrainedModel, PrinterCallback, TrainerCallback, TrainingArguments

from compressor.errors import UsageError
from compressor.heads.carry import carrying, frozen
from compressor.heads.gates import Gate
from compressor.heads.order import row_order
from compressor.heads.resume import claim, digest
from compressor.heads.trainer import Clip, GateTrainer
from compressor.quiet import quiet_transformers
from compressor.sites import Site
from compressor.tasks.base import Data


@dataclass(frozen=True)
class Schedule:
    """How long and how fast a joint run learns.

    Attributes:
        steps: optimizer steps.
        batch_size: rows a step and process.
        learning_rate: the model's peak learning rate, after a linear warm-up and before a linear decay to zero.
        seed: of the rows' order, of dropout and of the gate's noise.
        warmup: share of the steps over which the model's learning rate rises.
        weight_decay: AdamW's, on the model's matrices.
        max_grad_norm: bound on the norm of the model's gradient.
        evaluations: evaluations with hard gates over the run, evenly spaced; a checkpoint goes with each.
        points: points of the curves, evenly spaced.
        mixed_precision: what matrices are multiplied in, weights staying float32: `no` (float32) or `bf16`.
    """

    steps: int
    batch_size: int
    learning_rate: float
    seed: int
    warmup: float
    weight_decay: float
    max_grad_norm: float
    evaluations: int
    points: int
    mixed_precision: Literal["no", "bf16"]

    def __post_init__(self) -> None:
        if not 0 <= self.warmup <= 1:
            raise UsageError(f"warmup {self.warmup}: a share of the steps; give a number from 0 to 1")
        if self.weight_decay < 0 or self.max_grad_norm <= 0:
            raise UsageError(
                f"weight_decay {self.weight_decay}, max_grad_norm {self.max_grad_norm}: one must be at least 0 and the"
                " other above it; raise them"
            )
        if self.evaluations < 1 or self.points < 1:
            raise UsageError(f"evaluations {self.evaluations}, points {self.points}: give 1 or more of each")


class _Watch(TrainerCallback):
    """Adds what the gate shows and the heads kept today to each log line, and tells the caller how far the run is."""

    def __init__(self, gate: Gate, tell: Callable[[int, int], None]) -> None:
        self.gate, self.tell = gate, tell

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:  # whatever the intervals, the end is measured and kept
            control.should_log = control.should_evaluate = control.should_save = True
        self.tell(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The history is part of every checkpoint, so the curves of a resumed run are whole.
        if state.log_history and "loss" in (last := state.log_history[-1]):
            last["gate"] = {**self.gate.readings(state.global_step), **self.gate.counts()}
            last["kept"] = torch.nonzero(self.gate.harden()).flatten().tolist()


def train(
    model: PreTrainedModel,
    gate: Gate,
    sites: Sequence[Site],
    data: Data,
    schedule: Schedule,
    options: Mapping[str, Any],
    folder: Path,
    tell: Callable[[int, int], None],
    trains_model: bool = True,
) -> list[dict[str, Any]]:
    """Train `model` and `gate` in place and leave both at the best evaluation after the gates went cold.

    Args:
        data: its training rows are learnt from, its evaluation rows choose the checkpoint.
        options: what made the gate, to know the run by.
        folder: checkpoints; the same run found there is resumed.
        tell: called with (step, steps) after every step.
        trains_model: False freezes the model, dropout on: the gate alone learns.

    Returns:
        The log: one dictionary an entry, each with its `step`.
    """
    every = max(1, schedule.steps // schedule.evaluations)
    log_every = next(n for n in range(max(1, schedule.steps // schedule.points), 0, -1) if every % n == 0)
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=schedule.steps,
        per_device_train_batch_size=schedule.batch_size,
        per_device_eval_batch_size=4 * schedule.batch_size,
        learning_rate=schedule.learning_rate,
        weight_decay=schedule.weight_decay,
        max_grad_norm=0.0,  # clipped by Clip, the gate apart
        seed=schedule.seed % 2**32,  # NumPy's range
        use_cpu=not torch.cuda.is_available(),
        bf16=schedule.mixed_precision == "bf16",
        train_sampling_strategy="sequential",
        logging_steps=log_every,
        eval_strategy="steps",
        eval_steps=every,
        save_steps=every,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_chosen",
        greater_is_better=True,
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
    )
    world = args.world_size
    task = data.task
    order = row_order(data.train["length"], schedule.batch_size, schedule.steps * world, schedule.seed)

    def reduce(outputs: Any, labels: Tensor) -> Tensor:
        # Statistics of each row instead of its logits: a language model's would not fit in memory.
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        found = task.per_example(logits.float().cpu().numpy(), labels.cpu().numpy())
        return torch.from_numpy(found).to(labels.device)

    def measure(prediction: EvalPrediction) -> dict[str, float]:
        metric = task.score(np.asarray(prediction.predictions))
        step = trainer.state.global_step
        # While the gates are warm the hard subset still changes: such a checkpoint must not win.
        eligible = gate.cold(step) or step >= schedule.steps
        chosen = metric if task.higher_is_better else -metric
        return {task.metric: metric, "chosen": chosen if eligible else float("-inf")}

    settings = {
        "gate": type(gate).__name__,
        "start": [digest(model), digest(gate)],
        "schedule": asdict(schedule),
        "options": options,
        "trains_model": trains_model,
        "rows": [data.train_hash, data.eval_hash],
        "processes": processes(),
    }
    with _state().main_process_first():
        checkpoint = claim(folder, settings)
    held = nullcontext() if trains_model else frozen(model)
    with quiet_transformers(), held, carrying(model, gate, sites, lambda: trainer.state.global_step):
        trainer = GateTrainer(
            gate=gate,
            warmup_steps=round(schedule.warmup * schedule.steps),
            model=model,
            args=args,
            data_collator=task.collate,
            train_dataset=Subset(data.train, order),
            eval_dataset=Subset(data.eval, np.argsort(data.eval["length"], kind="stable").tolist()),
            compute_metrics=measure,
            preprocess_logits_for_metrics=reduce,
            callbacks=[Clip(gate, schedule.max_grad_norm), _Watch(gate, tell)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=checkpoint)
    return list(trainer.state.log_history)


def processes() -> int:
    """Processes of this run, as `accelerate launch` sets them up."""
    return _state().num_processes


def _state() -> PartialState:
    return PartialState(cpu=not torch.cuda.is_available())
