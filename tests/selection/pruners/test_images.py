"""Image models whose layers see windows of an image, or lie in nested lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

from compressor.progress import ignore_progress
from compressor.selection.pruners.base import Pruner
from compressor.selection.pruners.fisher import FisherPruner
from compressor.selection.pruners.reconstruct.pruner import ReconstructPruner
from compressor.units.layers import outermost_layers
from tests.selection.pruners.pruning import (
    check_dropped_units_have_no_effect,
    check_kept_counts,
    pruning_inputs,
    ranked,
)

ROWS = 12


def swin() -> PreTrainedModel:
    """Two layers of windows; those of the second one are shifted."""
    config = hf.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=4, initializer_range=0.3
    )
    return hf.SwinForImageClassification(config)


def pvt() -> PreTrainedModel:
    """Two stages, each a list of layers in a list."""
    config = hf.PvtConfig(
        image_size=16,
        num_encoder_blocks=2,
        depths=[1, 1],
        sequence_reduction_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[4, 2],
        strides=[4, 2],
        num_attention_heads=[2, 2],
        mlp_ratios=[2, 2],
        initializer_range=0.3,
    )
    return hf.PvtForImageClassification(config)


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], int]] = {"swin": (swin, 16), "pvt": (pvt, 16)}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("swin", FisherPruner),
        ("pvt", ReconstructPruner),
        pytest.param("swin", ReconstructPruner, marks=pytest.mark.zoo),
        pytest.param("pvt", FisherPruner, marks=pytest.mark.zoo),
    ],
)
def test_units_are_chosen_and_refitted(name: str, method: type[Pruner[Any]], tmp_path: Path) -> None:
    build, size = MODELS[name]
    torch.manual_seed(0)
    batches = [{"pixel_values": torch.randn(rows, 3, size, size)} for rows in (ROWS, ROWS, 4)]
    inputs = pruning_inputs(build().eval(), tmp_path, batches)
    assert {group.type for group in inputs.groups} == {"heads", "neurons"}
    pruner = ranked(method, inputs)
    check_kept_counts(pruner)
    assert all(curve[max(curve)] == 0 for curve in pruner.losses(ignore_progress).values())
    check_dropped_units_have_no_effect(pruner)


@pytest.mark.parametrize("name", ["pvt", "swin"])
def test_no_layer_is_a_list(name: str) -> None:
    layers = outermost_layers(MODELS[name][0]())
    assert layers
    assert not any(isinstance(layer, torch.nn.ModuleList) for layer in layers)
    inside = [module for layer in layers for module in layer.modules()]
    assert len(inside) == len(set(inside))
