"""Attach a gate to a model for training, freeze the model, and restore its state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from compressor.units import Bundles, Site, hooked
from compressor.units.find import restored_modes
from compressor.units.gate import Gate
from compressor.units.layers import gradients_of
from graph_passes.attention.gate_initializers import HEAD_GATE

_WRAPPED = ("forward", "_original_forward")
"""Attributes that accelerate sets on a model that it prepares for mixed precision."""


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Keep `model` unchanged while a gate on it is trained: no gradients, and no updates of batch statistics."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    try:
        for norm in norms:
            norm.track_running_stats = False
        with gradients_of(model.parameters(), required=False):
            yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore, on exit, the states of the random generators of Python, NumPy and PyTorch, which a trainer seeds."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def restore_model_state(model: PreTrainedModel) -> Iterator[None]:
    """Restore, on exit, the state besides the weights that a trainer changes.

    A trainer disables the cache, a loss may set the problem type, and mixed precision wraps `forward`, which would then
    compute, and be exported, in bfloat16.
    """
    config = dict(vars(model.config))
    forward = {name: vars(model)[name] for name in _WRAPPED if name in vars(model)}
    with restored_modes(model):
        try:
            yield
        finally:
            vars(model.config).update(config)
            for name in _WRAPPED:
                vars(model).pop(name, None)
            vars(model).update(forward)


@contextmanager
def attach_gate(
    model: PreTrainedModel, gate: Gate, groups: Sequence[Site | Bundles], step: Callable[[], int]
) -> Iterator[None]:
    """Make `gate` a submodule of `model` and multiply the units of every group by it.

    Gates are sampled in training and hard in evaluation. Units of other groups are left as they are.

    Args:
        gate: one multiplier per bundle of `groups`.
        groups: sites, whose heads each have a gate, and groups of units in bundles, in the order of the gates.
        step: returns the current training step.
    """
    members = [group if isinstance(group, Bundles) else Bundles.of_site(group) for group in groups]
    sites = [member.group.site for member in members if member.group.site is not None]
    gates_of_group: dict[str, Tensor] = {}

    def draw(module: nn.Module, args: Any) -> None:
        gates = gate.sample(step()) if module.training else gate.scale()
        parts = torch.split(gates, [member.count for member in members])
        gates_of_group.update({member.name: member.spread(part) for member, part in zip(members, parts, strict=True)})

    def multiply(name: str, output: Tensor) -> Tensor:
        return output * gates_of_group[name][:, None].to(output.dtype) if name in gates_of_group else output

    def multiply_input(name: str, linear: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] * gates_of_group[name].to(args[0].dtype), *args[1:])

    with ExitStack() as undo:
        model.add_module(HEAD_GATE, gate)  # a submodule, so that distributed wrappers see its parameters
        undo.callback(delattr, model, HEAD_GATE)
        undo.enter_context(model.register_forward_pre_hook(draw))
        for member in members:
            if member.group.type == "neurons":
                linear = model.get_submodule(member.name)
                undo.enter_context(linear.register_forward_pre_hook(partial(multiply_input, member.name)))
        undo.enter_context(hooked(model, multiply, sites=sites))
        yield
