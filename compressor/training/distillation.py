"""The loss of distillation: a model learns the answers of another, layer by layer, and needs no labels."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.tasks.divergence import divergence, is_regression
from compressor.tasks.forwards import DECODER_MASK, forward_arguments
from compressor.training.checkpoints import digest
from compressor.units.find import evaluation_mode

_HIDDEN_STATES = {
    "hidden_states": "attention_mask",
    "encoder_hidden_states": "attention_mask",
    "decoder_hidden_states": DECODER_MASK,
}
"""Outputs with one tensor for each layer, the embeddings first, and the mask of their positions."""


@dataclass(frozen=True)
class Distillation:
    """The loss of a student, from the outputs of its teacher on the same rows.

    The loss of a batch is T^2 KL(teacher / T || student / T), the mean over rows (Hinton et al. 2015, "Distilling the
    knowledge in a neural network", section 2), plus the error of the hidden states: for each layer the squared
    difference over the squared norm of the teacher's, over all tokens that are not padding, averaged over layers. For a
    regression the first part is the squared difference over the variance of the teacher's outputs in the batch.

    Student and teacher have the same layers and widths, so layers correspond one to one. Dropout is off.

    Attributes:
        teacher: the whole model, in evaluation mode; it is not changed.
        outputs: names of the model's outputs that the task scores.
        temperature: T.
        hidden_weight: weight of the error of the hidden states; models without hidden states have none.
    """

    teacher: PreTrainedModel
    outputs: tuple[str, ...]
    temperature: float = 2.0
    hidden_weight: float = 1.0

    @classmethod
    def of(cls, model: PreTrainedModel, outputs: tuple[str, ...], **weights: float) -> Distillation:
        """Distillation from a copy of a model, which may change afterwards."""
        teacher = copy.deepcopy(model).eval().requires_grad_(False)
        return cls(teacher, outputs, **weights)

    @property
    def settings(self) -> list[Any]:
        """What the loss depends on; checkpoints of another teacher or loss are not resumed."""
        return [digest(self.teacher), list(self.outputs), self.temperature, self.hidden_weight]

    def loss(self, student: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of a batch `[rows, ...]`, a scalar.

        Args:
            student: the model that is trained, possibly in a distributed wrapper.
            batch: its inputs, with or without labels, which are not used.
        """
        arguments = forward_arguments(self.teacher, batch)
        with torch.no_grad():
            target = self.teacher(**arguments, output_hidden_states=self.hidden_weight > 0)
        with evaluation_mode(student):  # dropout would hide the small errors that are left
            output = student(**arguments, output_hidden_states=self.hidden_weight > 0)
        return self._output_loss(target, output, batch) + self.hidden_weight * _hidden_loss(target, output, batch)

    def _output_loss(self, target: Any, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        single = len(self.outputs) == 1 and is_regression(target[self.outputs[0]])
        temperature = 1.0 if single else self.temperature
        dense = {name: target[name] / temperature for name in self.outputs}
        logits = {name: output[name] / temperature for name in self.outputs}
        rows = divergence(dense, logits, self.outputs, batch, dtype=torch.float32)
        return temperature**2 * rows.mean()


def _hidden_loss(target: Any, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The relative squared error of the hidden states, averaged over layers; zero where there are none."""
    errors = []
    for name, mask_name in _HIDDEN_STATES.items():
        mask = batch.get(mask_name)
        for dense, hidden in zip((target.get(name) or ())[1:], (output.get(name) or ())[1:], strict=True):
            weight = _position_weights(dense, mask)
            error = (dense - hidden).float().square() * weight
            errors.append(error.sum() / (dense.float().square() * weight).sum().clamp(min=1e-12))
    if not errors:
        return torch.zeros((), device=target[0].device)
    return torch.stack(errors).mean()


def _position_weights(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """One for each position that is not padding, else zero, to be multiplied with `[rows, positions, width]`."""
    if mask is None or mask.shape != hidden.shape[: mask.dim()]:
        return torch.ones((), device=hidden.device)
    return mask.to(hidden.device, torch.float32).reshape(*mask.shape, *(1,) * (hidden.dim() - mask.dim()))
