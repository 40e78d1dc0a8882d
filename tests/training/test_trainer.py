"""LAMB follows its paper, and moves gates as Adam does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compressor.training.fit import GateSetup
from compressor.training.trainer import lamb
from tests import language
from tests.training.gates import NoisyGate
from tests.training.runs import sites_of, train_model


def test_lamb_decays_inside_the_trust_ratio() -> None:
    """Algorithm 2 of You et al. 2020 without its bias correction; a norm beyond 10 counts as 10."""
    torch.manual_seed(0)
    weights = [(size * torch.randn(3, 4)).requires_grad_() for size in (1.0, 8.0)]
    decays, by_hand = (0.5, 0.0), [weight.detach().clone() for weight in weights]
    groups = [{"params": [weight], "weight_decay": decay} for weight, decay in zip(weights, decays, strict=True)]
    optimizer = lamb(groups, 0.1, (0.9, 0.999))
    first, second = ([torch.zeros(3, 4) for _ in range(2)] for _ in range(2))
    for _ in range(3):
        for index, weight in enumerate(weights):
            weight.grad = gradient = torch.randn(3, 4)
            first[index] = 0.9 * first[index] + 0.1 * gradient
            second[index] = 0.999 * second[index] + 0.001 * gradient**2
            update = first[index] / (second[index].sqrt() + 1e-6) + decays[index] * by_hand[index]
            by_hand[index] -= 0.1 * min(10.0, by_hand[index].norm()) / update.norm() * update
        optimizer.step()
        for weight, expected in zip(weights, by_hand, strict=True):
            assert torch.allclose(weight, expected, atol=1e-5)
    assert weights[1].norm() > 10 > weights[0].norm()


@pytest.mark.zoo
def test_lamb_moves_gates_as_adam_does(tmp_path: Path) -> None:
    weights = []
    for optimizer in ("adamw", "lamb"):
        folder, gate = language.folder(**language.UNDROPPED), NoisyGate(8, 5, 12)
        setup = GateSetup(gate, sites_of(folder), trains_model=False)
        schedule = language.schedule(optimizer=optimizer, evaluations=1)
        train_model(folder, language.data(tmp_path, folder), schedule, tmp_path / optimizer, gating=setup)
        weights.append(gate.weight.detach())
    assert not torch.allclose(weights[0], NoisyGate(8, 5, 12).weight)
    assert torch.allclose(weights[0], weights[1], atol=1e-2)
