"""Pooling: literal values, no influence of padding, and the same numbers in an exported graph."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from compressor.models.pooled_encoder import POOLINGS
from compressor.silence_libraries import quiet_tools

STATES = torch.tensor([[[1.0, -1.0], [3.0, -5.0], [9.0, 9.0]], [[2.0, 4.0], [4.0, 0.0], [0.0, -4.0]]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cls", [[1, -1], [2, 4]]),
        ("lasttoken", [[3, -5], [0, -4]]),
        ("max", [[3, -1], [4, 4]]),
        ("mean", [[2, -3], [2, 0]]),
        ("mean_sqrt_len_tokens", [[4 / math.sqrt(2), -6 / math.sqrt(2)], [6 / math.sqrt(3), 0]]),
    ],
)
def test_values(name: str, expected: list[list[float]]) -> None:
    assert torch.allclose(POOLINGS[name](STATES, MASK), torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("name", POOLINGS)
def test_padding_has_no_influence(name: str) -> None:
    padded, mask = nn.functional.pad(STATES, (0, 0, 0, 2), value=100.0), nn.functional.pad(MASK, (0, 2))
    assert torch.allclose(POOLINGS[name](padded, mask), POOLINGS[name](STATES, MASK))


@pytest.mark.parametrize("name", POOLINGS)
def test_a_single_state_is_its_own_embedding(name: str) -> None:
    state = torch.randn(3, 1, 4)
    assert torch.allclose(POOLINGS[name](state, torch.ones(3, 1)), state[:, 0])


class AllPoolings(nn.Module):
    """Every pooling of the same states."""

    def forward(self, states: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {name: pool(states, mask) for name, pool in POOLINGS.items()}


def test_a_graph_computes_the_same_at_other_sizes(tmp_path: Path) -> None:
    axes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("positions")}
    with quiet_tools():
        program = torch.onnx.export(
            AllPoolings(), (STATES, MASK), dynamo=True, dynamic_shapes={"states": axes, "mask": axes}, verbose=False
        )
    assert program is not None
    program.save(tmp_path / "pooling.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "pooling.onnx", providers=["CPUExecutionProvider"])
    states, mask = torch.randn(4, 7, 2), (torch.arange(7) < torch.tensor([[7], [1], [4], [6]])).long()
    outputs = session.run(None, {"states": states.numpy(), "mask": mask.numpy()})
    for output, pool in zip(outputs, POOLINGS.values(), strict=True):
        assert np.allclose(output, pool(states, mask), atol=1e-6)
