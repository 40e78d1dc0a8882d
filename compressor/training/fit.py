"""Training a model, alone or with one gate a head, on transformers' Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import Subset
from transformers import EvalPrediction, PreTrainedModel, PrinterCallback, TrainerCallback, TrainingArguments

from compressor.errors import DivergedError
from compressor.progress import ProgressCallback
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.base import Data
from compressor.tasks.segment_streams import Streams, assign_streams
from compressor.training.batch_order import row_order
from compressor.training.checkpoints import claim, digest, newest
from compressor.training.gated_model import attach_gate, frozen, restore_model_state
from compressor.training.schedule import Schedule
from compressor.training.segment_trainer import Laid, SegmentTrainer
from compressor.training.trainer import Clip, GateTrainer
from compressor.units import Site
from compressor.units.gate import Gate

Measured = Callable[[int, float], None]
"""Called with (step, metric) after an evaluation."""

_SLOWER = "lower the learning rate (--learning-rate) or warm it up for longer (--options warmup=0.2)"


class _Watch(TrainerCallback):
    """Adds what the gate shows and the heads kept today to each log line, and tells the caller how far the run is."""

    def __init__(self, gate: Gate | None, tell: ProgressCallback, metric: str, measured: Measured | None) -> None:
        self.gate, self.tell, self.metric, self.measured = gate, tell, metric, measured

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:  # whatever the intervals, the end is measured and kept
            control.should_log = control.should_evaluate = control.should_save = True
        self.tell(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The history is part of every checkpoint, so the curves of a resumed run are whole.
        if self.gate is not None and state.log_history and "loss" in (last := state.log_history[-1]):
            last["gate"] = {**self.gate.readings(state.global_step), **self.gate.counts()}
            last["kept"] = torch.nonzero(self.gate.harden()).flatten().tolist()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.measured is not None:
            self.measured(state.global_step, kwargs["metrics"][f"eval_{self.metric}"])


def fit(
    model: PreTrainedModel,
    data: Data,
    schedule: Schedule,
    asked: Mapping[str, Any],
    folder: Path,
    tell: ProgressCallback,
    *,
    gate: Gate | None = None,
    sites: Sequence[Site] = (),
    trains_model: bool = True,
    measured: Measured | None = None,
    refuse_others: bool = False,
    mend: str = _SLOWER,
) -> list[dict[str, Any]]:
    """Train `model`, and `gate` with it, in place and leave both at the best evaluation after the gates went cold.

    Rows are drawn anew every epoch. Those of a text that is read in order (`Streams`) are laid in streams side by side
    instead, and the model remembers the segments before.

    Args:
        data: its training rows are learnt from, its evaluation rows choose the checkpoint.
        asked: what else decides the run, e.g. the options that made the gate, to know it by.
        folder: checkpoints; the same run found there is resumed.
        tell: called with (step, steps) after every step.
        gate: one number a head of `sites`; None: nothing is gated.
        sites: the model's sites, in call order.
        trains_model: False freezes the model, dropout on: the gate alone learns.
        measured: told every evaluation.
        refuse_others: checkpoints of another run are an error; else they are thrown away.
        mend: what to do about a run that diverges, by the flags of the command that asked for it.

    Returns:
        The log: one dictionary an entry, each with its `step`.

    Raises:
        DivergedError: the loss, a gradient, a weight or the metric is no finite number; checkpoints are from before.
        UsageError: the folder holds another run's checkpoints (`refuse_others`).
    """
    every = max(1, schedule.steps // schedule.evaluations)
    log_every = next(n for n in range(max(1, schedule.steps // schedule.points), 0, -1) if every % n == 0)
    task = data.task
    streams = isinstance(task, Streams)
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=schedule.steps,
        per_device_train_batch_size=schedule.batch_size,
        per_device_eval_batch_size=schedule.batch_size * (1 if streams else 4),
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
        label_names=[task.label_name],
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
    )

    _one_device(args)

    def reduce(outputs: Any, labels: Tensor) -> Tensor:
        # Statistics of each row instead of its logits: a language model's would not fit in memory.
        named = dict(zip(task.outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=False))
        found = task.per_example(task.logits(named), labels.cpu().numpy())
        return torch.from_numpy(found).to(labels.device)

    def measure(prediction: EvalPrediction) -> dict[str, float]:
        step, statistics = trainer.state.global_step, np.asarray(prediction.predictions)
        # Before the checkpoint that goes with this evaluation is written: it would be taken for a good one.
        for name, weight in model.named_parameters():
            if not torch.isfinite(weight).all():
                raise DivergedError(f"step {step}: {name} is not finite")
        metric = task.score(statistics) if np.isfinite(statistics).all() else math.nan
        if not math.isfinite(metric):
            raise DivergedError(f"step {step}: the {task.metric} is {metric}")
        # While the gates are warm the hard subset still changes: such a checkpoint must not win.
        eligible = gate is None or gate.is_settled(step) or step >= schedule.steps
        chosen = metric if task.higher_is_better else -metric
        return {task.metric: metric, "chosen": chosen if eligible else float("-inf")}

    settings = {
        **asked,
        "schedule": asdict(schedule),
        "gate": None if gate is None else type(gate).__name__,
        "trains_model": trains_model,
        "processes": args.world_size,
        "rows": [data.train_hash, data.eval_hash],
        "start": [digest(model), *([] if gate is None else [digest(gate)])],
    }
    memories = args.world_size if streams else 0
    side_by_side = schedule.batch_size * args.world_size
    shared: dict[str, Any] = {
        "gate": gate,
        "schedule": schedule,
        "labelled": task.loss_inputs,
        "model": model,
        "args": args,
        "data_collator": task.collate,
        "compute_metrics": measure,
        "callbacks": [Clip(gate, schedule.max_grad_norm), _Watch(gate, tell, task.metric, measured)],
    }
    with ExitStack() as held:
        if streams:
            a_pass = assign_streams(len(data.train), side_by_side, whole=False)
            order = np.resize(a_pass, (schedule.steps, side_by_side)).ravel().tolist()
            evaluated = assign_streams(len(data.eval), side_by_side, whole=True).ravel().tolist()
        with _state().main_process_first():
            checkpoint = claim(folder, settings, refuse_others=refuse_others, memories=memories)
        held.enter_context(quiet_transformers())
        held.enter_context(restore_model_state(model))
        if not trains_model:
            held.enter_context(frozen(model))
        if gate is not None:
            held.enter_context(attach_gate(model, gate, sites, lambda: trainer.state.global_step))
        trainer: GateTrainer
        if streams:
            trainer = SegmentTrainer(
                pass_steps=len(a_pass),
                train_dataset=Laid(data.train, order),
                eval_dataset=Laid(data.eval, evaluated),
                **shared,
            )
        else:
            order = row_order(
                data.train["length"], schedule.batch_size, schedule.steps * args.world_size, schedule.seed
            )
            trainer = GateTrainer(
                train_dataset=Subset(data.train, order),
                eval_dataset=Subset(data.eval, np.argsort(data.eval["length"], kind="stable").tolist()),
                preprocess_logits_for_metrics=reduce,
                **shared,
            )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except DivergedError as error:
            good = newest(folder, memories)
            kept = f"the last good checkpoint is {good.name}" if good else "there was no checkpoint yet"
            raise DivergedError(f"{error}; {mend}; {kept}") from error
    return list(trainer.state.log_history)


def _one_device(args: TrainingArguments) -> None:
    """Keep the trainer from spreading a process over all GPUs it sees: `accelerate launch` gives each its own process.

    Otherwise a batch would be as many times as large, and its streams would meet the memory of others.
    """
    args._n_gpu = min(args.n_gpu, 1)


def processes() -> int:
    """Processes of this run, as `accelerate launch` sets them up."""
    return _state().num_processes


def _state() -> PartialState:
    return PartialState(cpu=not torch.cuda.is_available())
