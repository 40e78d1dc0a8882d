"""Run a model without gradients, and compare everything that a context could leave changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from compressor.units import OutputHook
from compressor.units.hook import configs


def forward(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """The first output of a model."""
    with torch.no_grad():
        return model(**inputs)[0]


def recorder(calls: list[str], label: str | None = None) -> OutputHook:
    """A hook that changes nothing and appends the site of each call, or a label, to a list."""

    def on_output(site: str, output: Tensor) -> Tensor:
        calls.append(label or site)
        return output

    return on_output


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that a context could leave changed."""
    return {
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "buffers": [name for name, _ in model.named_buffers()],
        "weights": {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()},
        "training": [module.training for module in model.modules()],
        "attention": [(id(config), config._attn_implementation) for config in configs(model)],
        "config": model.config.to_dict(),
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [len(module._forward_pre_hooks) for module in model.modules()],
        "interface": AttentionInterface.get_interface,
    }


def are_equal(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether two snapshots are equal, with weights at the same addresses."""
    first, second = before.pop("weights"), after.pop("weights")
    weights = first.keys() == second.keys() and all(
        first[name][0] == second[name][0] and torch.equal(first[name][1], second[name][1]) for name in first
    )
    return weights and before == after
