"""transformers' Trainer for a model with or without a gate, and for a model with segment memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import safetensors.torch
import torch
from pytorch_optimizer import Lamb
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import Trainer

from compressor.models.segments import Memories
from compressor.tasks.base import Task
from compressor.tasks.causal_lm import FILLER, summed_loss
from compressor.training.callbacks import require_finite
from compressor.training.checkpoints import memory_file
from compressor.training.distillation import Distillation
from compressor.training.schedule import Schedule
from compressor.units.gate import Gate
from graph_passes.attention.gate_initializers import HEAD_GATE

WEIGHTS = "model.safetensors"
_EPSILON = 1e-8

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


class GateTrainer(Trainer):
    """Trains a model, and the gate in its submodule `head_gate` if there is one.

    Rows are read in the order of `train_dataset`. Weights are saved by the names of `state_dict`, so that a checkpoint
    restores every tensor of model and gate or fails.

    Args:
        gate: one multiplier per unit; None: there is no gate.
        schedule: optimizer and learning rate.
        task: converts a collated batch to the model's arguments.
        distillation: the loss of a training step; None: the model's own, from labels.
        kwargs: arguments of transformers' Trainer.
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
        result = super().compute_loss(model, self.task.loss_inputs(inputs), *args, **kwargs)
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
        return loss, (*scored, self.task.example_means(divergences, inputs)[:, None]), labels

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
        rows: encoded rows.
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
        kwargs: arguments of `GateTrainer`.
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
