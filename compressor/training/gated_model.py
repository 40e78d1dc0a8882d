"""Attach a gate to a model for training, freeze the model, and restore its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from compressor.units import Site, hooked
from compressor.units.gate import Gate
from graph_passes.attention.gate_initializers import HEAD_GATE

_WRAPPED = ("forward", "_original_forward")
"""Attributes that accelerate sets on a model that it prepares for mixed precision."""


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Keep `model` unchanged while a gate on it is trained: no gradients, and no updates of batch statistics."""
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    for weight in trainable:
        weight.requires_grad_(False)
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for weight in trainable:
            weight.requires_grad_(True)
        for norm in norms:
            norm.track_running_stats = True


@contextmanager
def restore_model_state(model: PreTrainedModel) -> Iterator[None]:
    """Restore, on exit, the state besides the weights that a trainer changes.

    A trainer disables the cache, a loss may set the problem type, and mixed precision wraps `forward`, which would then
    compute, and be exported, in bfloat16.
    """
    was_training, config = model.training, dict(vars(model.config))
    forward = {name: vars(model)[name] for name in _WRAPPED if name in vars(model)}
    try:
        yield
    finally:
        model.train(was_training)
        vars(model.config).update(config)
        for name in _WRAPPED:
            vars(model).pop(name, None)
        vars(model).update(forward)


@contextmanager
def attach_gate(model: PreTrainedModel, gate: Gate, sites: Sequence[Site], step: Callable[[], int]) -> Iterator[None]:
    """Make `gate` a submodule of `model` and multiply the heads of every site by it.

    Gates are sampled in training and hard in evaluation.

    Args:
        model: the model.
        gate: one multiplier per head of `sites`.
        sites: the sites of the model, in call order.
        step: returns the current optimizer step.
    """
    gates_of_site: dict[str, Tensor] = {}

    def draw(module: nn.Module, args: Any) -> None:
        gates = gate.sample(step()) if module.training else gate.scale()
        parts = torch.split(gates, [site.heads for site in sites])
        gates_of_site.update({site.name: part[:, None] for site, part in zip(sites, parts, strict=True)})

    def multiply(name: str, output: Tensor) -> Tensor:
        return output * gates_of_site[name].to(output.dtype)

    model.add_module(HEAD_GATE, gate)  # a submodule, so that distributed wrappers see its parameters
    handle = model.register_forward_pre_hook(draw)
    try:
        with hooked(model, multiply):
            yield
    finally:
        handle.remove()
        delattr(model, HEAD_GATE)
