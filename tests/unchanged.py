"""Check that a model is left unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from compressor.units.hook import configs


@contextmanager
def unchanged(model: PreTrainedModel) -> Iterator[None]:
    """Check that modules, tensors, modes, configuration and attributes of a model are the same afterwards."""
    state, weights = _state(model), _weights(model)
    yield
    assert _state(model) == state
    after = _weights(model)
    assert after.keys() == weights.keys()
    for name, (pointer, value) in weights.items():
        assert after[name][0] == pointer, f"{name} is another tensor"
        assert torch.equal(after[name][1], value), f"{name} has other values"


def _weights(model: PreTrainedModel) -> dict[str, tuple[int, Tensor]]:
    return {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}


def _state(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "buffers": [name for name, _ in model.named_buffers()],
        "training": [module.training for module in model.modules()],
        "attention": [(id(config), config._attn_implementation) for config in configs(model)],
        "config": model.config.to_dict(),
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [len(module._forward_pre_hooks) for module in model.modules()],
        "interface": AttentionInterface.get_interface,
    }
