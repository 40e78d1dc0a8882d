"""A gate for the tests of training, which only uses the interface of gates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compressor.units.gate import Gate


class NoisyGate(Gate):
    """Gates near one with noise that depends only on the step; the heads of largest weight are kept.

    Args:
        heads: heads of the model.
        keep: heads to keep.
        steps: optimizer steps of the run.
    """

    def __init__(self, heads: int, keep: int, steps: int) -> None:
        super().__init__()
        self.units, self.keep, self.steps = heads, keep, steps
        self.learning_rate, self.max_grad_norm = 0.5, 1.0
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, heads, dtype=torch.float64))

    def sample(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return self.weight + 0.1 * torch.randn(self.units, generator=generator, dtype=torch.float64)

    def harden(self) -> Tensor:
        mask = torch.zeros(self.units, dtype=torch.bool)
        mask[self.weight.detach().topk(self.keep).indices] = True
        return mask

    def readings(self, step: int) -> dict[str, float]:
        return {"temperature": 1.0 - step / self.steps}
