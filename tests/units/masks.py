"""Random block masks, smaller copies of models, and the maps of their attention."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.units import Site, hooked, masked
from compressor.units.hook import Call
from graph_passes import BlockMask, Plan
from tests.zoo import FAMILIES

LENGTH = 40
"""Positions that the masks cover."""
_LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers")
"""Fields of configurations that hold a number of layers."""


def random_mask(site: Site, model: PreTrainedModel, seed: int, block: int = 1, share: float = 0.4) -> BlockMask:
    """A random mask; the first row of the second head and the whole third head have no block."""
    memory = getattr(model.config, "memory_length", 0)
    blocks = -(-LENGTH // block), -(-(LENGTH + memory) // block)
    kept = np.random.default_rng(seed).random((site.heads, *blocks)) < share
    kept[1 % site.heads, 0] = False
    kept[2 % site.heads] = False
    return BlockMask(kept, block, memory)


def one_layer(family: str, seed: int = 0) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The first layer of a family's model, of encoder and decoder each, and inputs."""
    model, inputs = FAMILIES[family](seed)
    config = copy.deepcopy(model.config)
    for name in _LAYERS:
        if hasattr(config, name):
            setattr(config, name, 1)
    smaller = type(model)(config).eval()
    smaller.load_state_dict(model.state_dict(), strict=False)
    return smaller, inputs


def maps_and_outputs(
    model: PreTrainedModel, inputs: dict[str, Tensor], plan: Plan
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The map of each site, and its output as the output projection receives it, at the site's first call."""
    maps, outputs = dict[str, Tensor](), dict[str, Tensor]()

    def on_output(site: str, output: Tensor) -> Tensor:
        outputs.setdefault(site, output)
        return output

    def on_weights(call: Call, weights: Tensor) -> None:
        maps.setdefault(call.site, weights)

    with (
        torch.no_grad(),
        masked(model, plan, attention="eager"),
        hooked(model, on_output, attention="eager", on_weights=on_weights),
    ):
        model(**inputs)
    return maps, outputs
