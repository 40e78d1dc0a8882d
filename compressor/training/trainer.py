"""transformers' Trainer for a model with or without a gate, and for a model with segment memory.

Beside the trainers are their arguments, and the metric by which an evaluation during training selects a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import safetensors.torch
import torch
from pytorch_optimizer import Lamb
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import EvalPrediction, Trainer, TrainingArguments

from compressor.models.forwards import arrays_of, summed_loss, tensors_of
from compressor.models.segments import Memories
from compressor.tasks.base import Task
from compressor.tasks.causal_lm import FILLER
from compressor.training.callbacks import StepCounter, diverged, require_finite
from compressor.training.checkpoints import memory_file
from compressor.training.distillation import Distillation
from compressor.training.schedule import Schedule
from compressor.units.gate import Gate
from graph_passes.attention.gate_initializers import HEAD_GATE

WEIGHTS = "model.safetensors"
_EPSILON = 1e-8

SELECTION_METRIC = "chosen"
"""Name under which an evaluation reports the number that selects the best checkpoint; larger is better."""
EVALUATION_FACTOR = 4
"""Size of an evaluation batch as a multiple of a training batch; evaluation stores no gradients."""
DIVERGENCE = "divergence"
"""Name of the mean divergence from a teacher in the metrics of an evaluation."""

Groups = list[dict[str, Any]]
"""Parameter groups of an optimizer."""


def lamb(groups: Any, learning_rate: float, betas: tuple[float, float]) -> Lamb:
    """The optimizer LAMB (You et al. 2020, algorithm 2), with weight decay inside the norm of the update.

    As in `pytorch_optimizer`, the scaling function phi limits the norm of a tensor to 10. The norm of the persistent
    vectors of a layer exceeds 10, so each step changes them by a smaller fraction than a small matrix.

    There is no bias correction, as in version 3 of the paper; that of `pytorch_optimizer` would be partial.

    Args:
        groups: parameters or parameter groups.
        learning_rate: learning rate of groups without their own.
        betas: decay rates of the first and second moment.
    """
    return Lamb(groups, lr=learning_rate, betas=betas, weight_decouple=False, adam_debias=True)


def training_arguments(schedule: Schedule, task: Task, folder: Path) -> TrainingArguments:
    """Arguments of the trainer, on one device per process.

    Args:
        task: determines the label name and the size of evaluation batches.
    """
    evaluation_steps = max(1, schedule.steps // schedule.evaluations)
    # Steps between points of the curves divide those between evaluations, so that every evaluation is at a point.
    most = max(1, schedule.steps // schedule.points)
    logging_steps = next(steps for steps in range(most, 0, -1) if evaluation_steps % steps == 0)
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
        logging_steps=logging_steps,
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


class Evaluation:
    """Computes the metric of a task from the outputs of a model.

    Args:
        model: its weights are checked before a checkpoint is written.
        task: its metric selects the best checkpoint.
        gate: no checkpoint but the last is eligible before the gate has settled; None: there is no gate.
        by_divergence: whether the divergence from a teacher, the last output of each example, selects the checkpoint.
            The divergence varies less between examples than a metric does, so few rows suffice.
        first_step: no checkpoint is eligible before this step.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        gate: Gate | None,
        counter: StepCounter,
        steps: int,
        *,
        by_divergence: bool = False,
        first_step: int = 0,
    ) -> None:
        self._model, self._task, self._gate, self._counter, self._steps = model, task, gate, counter, steps
        self._by_divergence, self._first_step = by_divergence, first_step

    def row_statistics(self, outputs: Any, labels: Tensor) -> Tensor:
        """Statistics `[batch, k]` of one batch. They replace the logits, which may not fit in memory for all rows.

        Args:
            outputs: the model's outputs, a tuple or a single one.
            labels: labels of the batch, `[batch, ...]`.
        """
        task = self._task
        by_name = dict(zip(task.outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=False))
        statistics = task.per_example(task.logits(by_name), labels.cpu().numpy())
        if self._by_divergence:
            statistics = np.concatenate([statistics, outputs[-1].cpu().numpy()], axis=1)
        return torch.from_numpy(statistics).to(labels.device)

    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """The metric by name, and the number that selects the best checkpoint.

        Raises:
            DivergedError: a weight or the metric is not finite. The error comes before the checkpoint is written, so no
                bad checkpoint remains.
        """
        step, task, statistics = self._counter.step, self._task, np.asarray(prediction.predictions)
        for name, weight in self._model.named_parameters():
            finite = torch.isfinite(weight)
            if not finite.all():
                raise diverged(step, f"weight {name}", float(weight.detach()[~finite][0]))
        of_task = statistics[:, :-1] if self._by_divergence else statistics
        metric = task.score(of_task) if np.isfinite(of_task).all() else math.nan
        if not math.isfinite(metric):
            raise diverged(step, task.metric, metric)
        values, selection = {task.metric: metric}, metric if task.higher_is_better else -metric
        if self._by_divergence:
            values[DIVERGENCE] = float(statistics[:, -1].mean())
            selection = -values[DIVERGENCE]
        # Evaluations before `first_step` cannot be compared with later ones.
        is_settled = self._gate is None or self._gate.is_settled(step) or step >= self._steps
        is_eligible = is_settled and step >= self._first_step
        return {**values, SELECTION_METRIC: selection if is_eligible else -math.inf}


class GateTrainer(Trainer):
    """Trains a model, and the gate in its submodule `head_gate` if there is one.

    Rows are read in the order of `train_dataset`. Weights are saved by the names of `state_dict`, so that a checkpoint
    restores every tensor of model and gate or fails.

    Args:
        gate: one multiplier per unit; None: there is no gate.
        schedule: optimizer and learning rate.
        task: selects or computes the model's arguments from a collated batch.
        distillation: the loss of a training step; None: the model's own, from labels.
    """

    def __init__(
        self,
        *,
        gate: Gate | None,
        schedule: Schedule,
        task: Task,
        distillation: Distillation | None = None,
        **kwargs: Any,
    ) -> None:
        self.gate, self.schedule, self.task, self.distillation = gate, schedule, task, distillation
        super().__init__(**kwargs)
        if distillation is not None:
            distillation.teacher.to(self.args.device)  # type: ignore[arg-type]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            groups, rate = self._parameter_groups(), self.schedule.learning_rate
            betas = self.args.adam_beta1, self.args.adam_beta2
            if self.schedule.optimizer == "lamb":
                if self.gate is not None:  # a gate's weights are not a matrix whose norm could scale the rate
                    groups[-1] |= {"adam": True, "eps": _EPSILON}
                self.optimizer = lamb(groups, rate, betas)
            else:
                self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=betas, eps=_EPSILON, fused=True)
        return self.optimizer

    def _parameter_groups(self) -> Groups:
        """Groups of the trained parameters: the model's with and without weight decay, then the gate's."""
        decayed = set(self.get_decay_parameter_names(self._gated_model))
        trained = [(name, weight) for name, weight in self._gated_model.named_parameters() if weight.requires_grad]
        of_model = [(name, weight) for name, weight in trained if not name.startswith(f"{HEAD_GATE}.")]
        groups: Groups = [
            {"params": [w for name, w in of_model if name in decayed], "weight_decay": self.schedule.weight_decay},
            {"params": [w for name, w in of_model if name not in decayed], "weight_decay": 0.0},
        ]
        if self.gate is not None:
            of_gate = [weight for name, weight in trained if name.startswith(f"{HEAD_GATE}.")]
            groups.append({"params": of_gate, "weight_decay": 0.0, "lr": self.gate.learning_rate})
        return [group for group in groups if group["params"]]  # a frozen model has none

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        if self.lr_scheduler is None:
            trained = self.create_optimizer()
            paces: list[Callable[[int], float]] = [self.schedule.pace for _ in trained.param_groups]
            if self.gate is not None:
                paces[-1] = self._pace_of_gate  # its group is the last
            self.lr_scheduler = LambdaLR(trained, paces)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """No norm: the trainer computes one only to log it, and `ClipGradients` has those of model and gate."""

    def _pace_of_gate(self, step: int) -> float:
        """Factor on the gate's learning rate at `step`."""
        assert self.gate is not None
        pace = self.gate.learning_rate_at(step)
        if self.schedule.optimizer == "lamb":
            # LAMB relies on the warm-up in place of Adam's bias correction; gates have no warm-up.
            first, second = self.args.adam_beta1, self.args.adam_beta2
            pace *= math.sqrt(1 - second ** (step + 1)) / (1 - first ** (step + 1))
        return pace

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self.distillation is not None and not torch.isfinite(loss):
            self.distillation.require_defined_teacher(self.task.model_inputs(self._prepare_inputs(inputs)))
        require_finite(loss, "loss", self.state.global_step)
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of the task plus the gate's penalty, and the outputs if they are requested.

        A training step with a teacher has the loss of distillation in place of that of the task.
        """
        if self.distillation is not None and model.training:
            return self._with_penalty(self.distillation.loss(model, self.task.model_inputs(inputs)))
        batch = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        arguments = tensors_of(self.task.loss_inputs(arrays_of(batch)), self.args.device)
        further = {name: value for name, value in inputs.items() if name not in batch}  # e.g. memories
        result = super().compute_loss(model, {**arguments, **further}, *args, **kwargs)
        if not model.training:
            return result
        return (self._with_penalty(result[0]), result[1]) if isinstance(result, tuple) else self._with_penalty(result)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loss, outputs and labels of an evaluation batch; with a teacher the divergences of its examples come last."""
        loss, outputs, labels = super().prediction_step(model, inputs, *args, **kwargs)
        if self.distillation is None or outputs is None:
            return loss, outputs, labels
        scored = outputs if isinstance(outputs, tuple) else (outputs,)
        names = dict.fromkeys((*self.task.outputs, *self.distillation.outputs))
        by_name = dict(zip(names, scored, strict=False))
        inputs = self._prepare_inputs(inputs)
        divergences = self.distillation.divergences(by_name, self.task.model_inputs(inputs))
        means = self.task.example_means(divergences.cpu().numpy(), arrays_of(inputs))
        return loss, (*scored, torch.from_numpy(means)[:, None].to(divergences.device)), labels

    def _with_penalty(self, loss: Tensor) -> Tensor:
        if self.gate is None:
            return loss
        penalty: Tensor = self.gate.penalty(self.state.global_step)
        return loss + penalty.to(loss.dtype)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_model(self._gated_model, str(folder / WEIGHTS))
        if self.distillation is not None and self.distillation.kept is not None:
            self.distillation.kept.save()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        safetensors.torch.load_model(self._gated_model, str(Path(resume_from_checkpoint) / WEIGHTS))

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    @property
    def _gated_model(self) -> nn.Module:
        """The model with its gate, without distributed wrappers."""
        assert isinstance(self.model, nn.Module)
        return self.model


class StreamRows(Dataset[Any]):
    """Rows in the order in which parallel streams read them; None for `FILLER`.

    Args:
        order: row numbers; the first segment of every stream, then the second segment of every stream, and so on.
    """

    def __init__(self, rows: datasets.Dataset, order: Sequence[int]) -> None:
        self.rows, self.order = rows, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        return None if (row := self.order[index]) == FILLER else self.rows[row]


class SegmentTrainer(GateTrainer):
    """`GateTrainer` over streams: each batch is the next segment of every stream, with the memories of the one before.

    Memories are stored in every checkpoint.

    Args:
        pass_steps: number of steps after which the streams end and start again without memory.
    """

    def __init__(self, *, pass_steps: int, **kwargs: Any) -> None:
        self.pass_steps = pass_steps
        self.train_memories: Memories | None = None
        self.eval_memories: Memories | None = None
        super().__init__(**kwargs)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step % self.pass_steps == 0:
            self.train_memories = None
        kwargs["return_outputs"] = True
        loss, outputs = super().compute_loss(model, {**inputs, "memories": self.train_memories}, *args, **kwargs)
        self.train_memories = outputs.memories
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.eval_memories = None
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[None, Tensor, Tensor]:
        """Statistics of each row instead of its logits, which would not fit in memory."""
        inputs = self._prepare_inputs(inputs)
        targets = inputs.pop("shift_labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs, memories=self.eval_memories)
        self.eval_memories = outputs.memories
        return None, summed_loss(outputs.logits, targets), targets

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        memories = {str(layer): memory.contiguous() for layer, memory in enumerate(self.train_memories or ())}
        safetensors.torch.save_file(memories, memory_file(Path(output_dir), self.args.process_index))
        self.accelerator.wait_for_everyone()  # older checkpoints are deleted only after all processes have written

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            memories = safetensors.torch.load_file(memory_file(Path(checkpoint), self.args.process_index))
            layers = tuple(memories[str(layer)].to(self.args.device) for layer in range(len(memories)))
            self.train_memories = layers or None
