"""transformers' Trainer with a gate on every head: adds the gate's optimizer group, its penalty and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments

from compressor.heads.carry import GATE
from compressor.heads.gates import Gate

WEIGHTS = "model.safetensors"


class Clip(TrainerCallback):
    """Clips the gate's gradient on its own: near a tie it is so large that a joint norm would stop the model."""

    def __init__(self, gate: Gate, max_grad_norm: float) -> None:
        self.gate, self.max_grad_norm = gate, max_grad_norm

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        own = set(self.gate.parameters())
        rest = [weight for weight in kwargs["model"].parameters() if weight not in own]
        nn.utils.clip_grad_norm_(list(own), self.gate.max_grad_norm)
        nn.utils.clip_grad_norm_(rest, self.max_grad_norm)


class GateTrainer(Trainer):
    """Trains a model that carries a gate as its submodule `head_gate`.

    Rows are visited in the order in which `train_dataset` lists them. Weights are saved by `state_dict` names, so that
    what a checkpoint restores is every tensor of the model and the gate, or an error.
    """

    def __init__(self, *, gate: Gate, warmup_steps: int, **kwargs: Any) -> None:
        self.gate, self.model_warmup_steps = gate, warmup_steps
        super().__init__(**kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            args: TrainingArguments = self.args
            decayed = set(self.get_decay_parameter_names(self._whole))
            named = [(n, p) for n, p in self._whole.named_parameters() if p.requires_grad]
            mine = [(n, p) for n, p in named if not n.startswith(f"{GATE}.")]
            gate = {"params": [p for n, p in named if n.startswith(f"{GATE}.")]}
            groups = [
                {"params": [p for n, p in mine if n in decayed], "weight_decay": args.weight_decay},
                {"params": [p for n, p in mine if n not in decayed], "weight_decay": 0.0},
                {**gate, "weight_decay": 0.0, "lr": self.gate.learning_rate},
            ]
            self.optimizer = torch.optim.AdamW(
                [group for group in groups if group["params"]],  # a frozen model has none
                lr=args.learning_rate,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
                fused=True,
            )
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        def of_model(step: int) -> float:
            if step < self.model_warmup_steps:
                return step / self.model_warmup_steps
            return max(0.0, (num_training_steps - step) / max(1, num_training_steps - self.model_warmup_steps))

        if self.lr_scheduler is None:
            made = self.create_optimizer()
            paces: list[Callable[[int], float]] = [of_model for _ in made.param_groups]
            paces[-1] = self.gate.learning_rate_at  # the gate's group is the last
            self.lr_scheduler = LambdaLR(made, paces)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **kwargs)
        if not model.training:
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
