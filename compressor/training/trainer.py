"""transformers' Trainer with or without a gate on every head: groups, pace, penalty, clipping, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pytorch_optimizer import Lamb
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback

from compressor.errors import DivergedError
from compressor.training.schedule import Schedule
from compressor.units.gate import Gate
from graph_passes.attention.gates import GATE

WEIGHTS = "model.safetensors"

Labelled = Callable[[dict[str, Any]], dict[str, Any]]


class Clip(TrainerCallback):
    """Clips the gate's gradient on its own: near a tie it is so large that a joint norm would stop the model."""

    def __init__(self, gate: Gate | None, max_grad_norm: float) -> None:
        self.gate, self.max_grad_norm = gate, max_grad_norm

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        own = set(self.gate.parameters()) if self.gate is not None else set()
        rest = [weight for weight in kwargs["model"].parameters() if weight not in own]
        norms = [nn.utils.clip_grad_norm_(rest, self.max_grad_norm)]
        if self.gate is not None:
            norms.append(nn.utils.clip_grad_norm_(list(own), self.gate.max_grad_norm))
        for norm in norms:
            require_finite(norm, "gradient's norm", state.global_step)


def require_finite(value: Tensor, name: str, step: int) -> None:
    """Stop before a step that would leave no number in the weights.

    Raises:
        DivergedError: `value` is no finite number.
    """
    if not math.isfinite(number := float(value)):
        raise DivergedError(f"step {step + 1}: the {name} is {number}")


def lamb(groups: Any, rate: float, betas: tuple[float, float]) -> Lamb:
    """LAMB as in You et al. 2020, algorithm 2: the norm of the update, by which a rate is scaled, is with its decay.

    The other scale, phi of a tensor's own norm, is that norm up to 10 and 10 beyond, as the library has it: the many
    persistent vectors of a layer lie beyond, so each step moves them by less of their size than a small matrix.

    No bias correction, as in the paper's third version: the library would do it in part.
    """
    return Lamb(groups, lr=rate, betas=betas, weight_decouple=False, adam_debias=True)


class GateTrainer(Trainer):
    """Trains a model, and the gate that it carries as its submodule `head_gate`, if it does.

    Rows are visited in the order in which `train_dataset` lists them. Weights are saved by `state_dict` names, so that
    what a checkpoint restores is every tensor of the model and the gate, or an error.

    Args:
        gate: one number a head, or None.
        schedule: rates and their pace.
        labelled: makes of a collated batch what the model computes its loss from (`Task.loss_inputs`).
        kwargs: transformers' own.
    """

    def __init__(self, *, gate: Gate | None, schedule: Schedule, labelled: Labelled, **kwargs: Any) -> None:
        self.gate, self.schedule, self.labelled = gate, schedule, labelled
        super().__init__(**kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            decayed = set(self.get_decay_parameter_names(self._whole))
            named = [(n, p) for n, p in self._whole.named_parameters() if p.requires_grad]
            mine = [(n, p) for n, p in named if not n.startswith(f"{GATE}.")]
            groups: list[dict[str, Any]] = [
                {"params": [p for n, p in mine if n in decayed], "weight_decay": self.schedule.weight_decay},
                {"params": [p for n, p in mine if n not in decayed], "weight_decay": 0.0},
            ]
            if self.gate is not None:
                own = [p for n, p in named if n.startswith(f"{GATE}.")]
                groups.append({"params": own, "weight_decay": 0.0, "lr": self.gate.learning_rate})
            groups = [group for group in groups if group["params"]]  # a frozen model has none
            rate, betas, eps = self.schedule.learning_rate, (self.args.adam_beta1, self.args.adam_beta2), 1e-8
            if self.schedule.optimizer == "lamb":
                if self.gate is not None:
                    groups[-1] |= {"adam": True, "eps": eps}  # a gate's weights are no matrix: no rate by their norm
                self.optimizer = lamb(groups, rate, betas)
            else:
                self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps, fused=True)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        if self.lr_scheduler is None:
            made = self.create_optimizer()
            paces: list[Callable[[int], float]] = [self.schedule.pace for _ in made.param_groups]
            if self.gate is not None:
                paces[-1] = self._pace_of_gate  # its group is the last
            self.lr_scheduler = LambdaLR(made, paces)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _pace_of_gate(self, step: int) -> float:
        assert self.gate is not None
        pace = self.gate.learning_rate_at(step)
        if self.schedule.optimizer == "lamb":
            # LAMB leaves Adam's bias correction to the warm-up, which gates do not have.
            first, second = self.args.adam_beta1, self.args.adam_beta2
            pace *= math.sqrt(1 - second ** (step + 1)) / (1 - first ** (step + 1))
        return pace

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        require_finite(loss, "loss", self.state.global_step)
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, self.labelled(inputs), *args, **kwargs)
        if self.gate is None or not model.training:
            return found
        push: Tensor = self.gate.penalty(self.state.global_step)
        if isinstance(found, tuple):
            return found[0] + push.to(found[0].dtype), found[1]
        return found + push.to(found.dtype)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_model(self._whole, str(folder / WEIGHTS))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        safetensors.torch.load_model(self._whole, str(Path(resume_from_checkpoint) / WEIGHTS))

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    @property
    def _whole(self) -> nn.Module:
        """The model with its gate, out of any distributed wrapper."""
        assert isinstance(self.model, nn.Module)
        return self.model
