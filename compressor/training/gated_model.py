"""A model with a gate on every head, for the time that both learn."""

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
from graph_passes.attention.gates import GATE

_WRAPPED = ("forward", "_original_forward")
"""What accelerate sets on a model that it prepares for mixed precision."""


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Keep `model` as it is while a gate on it learns: no gradient for its parameters, no new batch statistics."""
    learnt = [weight for weight in model.parameters() if weight.requires_grad]
    counting = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    for weight in learnt:
        weight.requires_grad_(False)
    for module in counting:
        module.track_running_stats = False
    try:
        yield
    finally:
        for weight in learnt:
            weight.requires_grad_(True)
        for module in counting:
            module.track_running_stats = True


@contextmanager
def restore_model_state(model: PreTrainedModel) -> Iterator[None]:
    """Put back what a trainer changes beside the weights: it turns the cache off, a loss may note its problem type, and
    mixed precision wraps `forward`, which would then compute, and be exported, in bfloat16."""
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
    """Hang `gate` on `model` and multiply every site's heads by it: sampled in training, hard in evaluation."""
    now: dict[str, Tensor] = {}

    def draw(module: nn.Module, args: Any) -> None:
        gates = gate.sample(step()) if module.training else gate.scale()
        parts = torch.split(gates, [site.heads for site in sites])
        now.update({site.name: part[:, None] for site, part in zip(sites, parts, strict=True)})

    def apply(name: str, out: Tensor) -> Tensor:
        return out * now[name].to(out.dtype)

    model.add_module(GATE, gate)  # on the model, so that distributed wrappers see its parameters
    handle = model.register_forward_pre_hook(draw)
    try:
        with hooked(model, apply):
            yield
    finally:
        handle.remove()
        delattr(model, GATE)
