"""Callbacks of transformers' Trainer: the current step, clipping of gradients, curves and progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from compressor.errors import DivergedError, ErrorCode
from compressor.progress import ProgressCallback
from compressor.units.gate import Gate

EvaluationCallback = Callable[[int, float], None]
"""Called with (step, metric) after an evaluation."""


class StepCounter(TrainerCallback):
    """Counts training steps, for code that runs inside a forward or an evaluation.

    Attributes:
        step: number of finished training steps.
    """

    def __init__(self) -> None:
        self.step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step  # not zero in a resumed run

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step


class ClipGradients(TrainerCallback):
    """Clips the gradients of model and gate separately.

    Near a tie of two heads the gradient of a gate is so large that clipping by a joint norm would stop the training of
    the model.

    Args:
        gate: the gate, a submodule of the model; None: there is no gate.
        max_grad_norm: maximum norm of the model's gradient.
    """

    def __init__(self, gate: Gate | None, max_grad_norm: float) -> None:
        self.gate, self.max_grad_norm = gate, max_grad_norm

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gate_weights = set(self.gate.parameters()) if self.gate is not None else set()
        model_weights = [weight for weight in kwargs["model"].parameters() if weight not in gate_weights]
        clip(model_weights, self.max_grad_norm, state.global_step)
        if self.gate is not None:
            clip(list(gate_weights), self.gate.max_grad_norm, state.global_step)


def clip(weights: Sequence[nn.Parameter], maximum: float, finished_steps: int) -> None:
    """Scale the gradients of some weights where their joint norm exceeds a maximum.

    `torch.nn.utils.clip_grad_norm_` writes them in any case, which takes half of its time.

    Raises:
        DivergedError: the norm is not finite.
    """
    norm = nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
    require_finite(norm, "gradient norm", finished_steps)
    if float(norm) > maximum:
        nn.utils.clip_grads_with_norm_(weights, maximum, norm)


class RunCallback(TrainerCallback):
    """Reports the progress of a run and adds the gate's readings to its log.

    Args:
        gate: the gate; None: there is no gate.
        on_progress: called after every step.
        on_evaluation: called after every evaluation; None: evaluations are not reported.
    """

    def __init__(
        self,
        gate: Gate | None,
        metric: str,
        on_progress: ProgressCallback,
        on_evaluation: EvaluationCallback | None,
    ) -> None:
        self.gate, self.metric, self.on_progress, self.on_evaluation = gate, metric, on_progress, on_evaluation

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:  # the last step is always evaluated and saved
            control.should_log = control.should_evaluate = control.should_save = True
        self.on_progress(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Every checkpoint contains the history, so that the curves of a resumed run are complete.
        if self.gate is not None and state.log_history and "loss" in (entry := state.log_history[-1]):
            entry["gate"] = {**self.gate.readings(state.global_step), **self.gate.counts()}
            entry["kept"] = torch.nonzero(self.gate.harden()).flatten().tolist()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.on_evaluation is not None:
            self.on_evaluation(state.global_step, kwargs["metrics"][f"eval_{self.metric}"])


def require_finite(value: Tensor, quantity: str, finished_steps: int) -> None:
    """Check that a number is finite, before a training step would write NaN into the weights.

    Args:
        value: the number, a scalar tensor.
        quantity: its name in the error message, e.g. `loss`.
        finished_steps: training steps before the current one.

    Raises:
        DivergedError: `value` is not finite.
    """
    if not math.isfinite(number := float(value)):
        raise diverged(finished_steps + 1, quantity, number)


def diverged(step: int, quantity: str, value: float) -> DivergedError:
    """The error for a quantity that is not finite.

    Args:
        step: the training step at which it was computed, counted from 1.
        quantity: its name, e.g. `loss`.
        value: NaN or an infinity.
    """
    return DivergedError(
        f"step {step}: the {quantity} is {value}",
        code=ErrorCode.NOT_FINITE,
        step=step,
        quantity=quantity,
        value=value,
    )
