"""Gate a PyTorch model by a plan: the shrunk graph must compute the function of the gated model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, InputError, SiteRefusedError
from compressor.units.find import unread_sites
from compressor.units.hook import Attention, Call, OutputHook, WeightsHook, family, intercepted, unwrap
from compressor.units.layers import is_linear, linear_sizes
from compressor.units.masking import masked
from compressor.units.projections import hooked_projections
from compressor.units.prunable import Site, missing_site, plan_mismatch
from graph_passes import GroupPlan, Plan, SitePlan
from graph_passes.attention.gate_initializers import GATE_NAMES, HEAD_GATE

logger = logging.getLogger(__name__)


@contextmanager
def gated(model: PreTrainedModel, plan: Plan, *, attention: Attention | None = None) -> Iterator[PreTrainedModel]:
    """The model with every unit multiplied by its gate: the scale of a kept head or neuron, zero for a dropped one.

    Heads on which no output of a graph depends, by the last `find_sites` of the model, pass unchanged. Block masks of
    the plan are applied too; see `masked`. Inside the context, each site has a buffer `head_gate` `[heads, 1]`, and
    each linear that reads neurons a buffer `neuron_gate` `[neurons]`, which become initializers of an exported graph.
    On exit the model is restored: the same modules, state dict and configuration.

    Args:
        model: a transformers model.
        plan: one entry for each site of the model, and for feed-forwards.
        attention: run every attention as `eager` or `sdpa`; None: as configured.

    Raises:
        InputError: the plan names a group that the model lacks, or the model is gated already; on a call, if the plan
            lacks a site of the model or has other sizes.
        SiteRefusedError: an attention cannot be gated in this form.
    """
    plan.require_masks()
    bare = unwrap(model)
    modules = dict(bare.named_modules())
    for group in plan.groups:
        _check_module(group, modules, bare)
    planned = {site.name: site for site in plan.sites}

    def multiply_input(linear: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] * getattr(linear, GATE_NAMES["neurons"]), *args[1:])

    def multiply(name: str, output: Tensor) -> Tensor:
        if name not in planned:
            raise missing_site(name, "plan")
        _check_output(planned[name], output)
        return output * getattr(modules[name], HEAD_GATE)

    with ExitStack() as undo:
        for group in plan.groups:
            module, name = modules[group.name], GATE_NAMES[group.type]
            module.register_buffer(name, _gate_of(module, group, bare), persistent=False)
            undo.callback(delattr, module, name)
        for feed_forward in plan.feed_forwards:
            undo.enter_context(modules[feed_forward.name].register_forward_pre_hook(multiply_input))
        undo.enter_context(hooked(model, multiply, sites=plan.sites, attention=attention))
        if plan.masks:
            undo.enter_context(masked(model, plan, attention=attention))
        logger.debug("%s: %d heads kept at %d sites", family(bare), plan.heads_kept, len(plan.sites))
        yield model


def _gate_of(module: nn.Module, group: GroupPlan, model: PreTrainedModel) -> Tensor:
    # The output of a module has the device and the type of its weights.
    weight = next((tensor for tensor in module.parameters() if tensor.is_floating_point()), None)
    dtype, device = (model.dtype, model.device) if weight is None else (weight.dtype, weight.device)
    gate = torch.tensor(group.gate, dtype=dtype, device=device)
    return gate[:, None] if group.type == "heads" else gate


def _check_module(group: GroupPlan, modules: Mapping[str, nn.Module], model: PreTrainedModel) -> None:
    """Raise InputError unless a gate can be attached to the module of a group."""
    name = group.name
    if name not in modules:
        raise plan_mismatch(f"{family(model)} has no module {name}", name)
    module = modules[name]
    if hasattr(module, GATE_NAMES[group.type]):
        text = f"plan: {name} is gated already; leave the context that gates it first"
        raise InputError(text, code=ErrorCode.CONTRADICTION, site=name)
    if group.type == "heads":
        return
    actual = linear_sizes(module)[0] if is_linear(module) else None
    if actual != group.units:
        present = "no linear" if actual is None else actual
        text = f"{name}: {group.units} neurons in the plan, {present} in the model"
        raise plan_mismatch(text, name, planned=group.units, actual=actual)


def _check_output(site: SitePlan, output: Tensor) -> None:
    """Raise InputError unless an output `[batch, query, head, head_dim]` has the sizes of the plan."""
    heads, head_dim = output.shape[2:]
    if (heads, head_dim) != (site.heads, site.head_dim):
        planned = (site.heads, site.head_dim)
        text = f"{site.name}: {site.heads} heads of {site.head_dim} in the plan, {heads} of {head_dim} in the model"
        raise plan_mismatch(text, site.name, planned=planned, actual=(heads, head_dim))


@contextmanager
def hooked(
    model: nn.Module,
    on_output: OutputHook,
    *,
    sites: Iterable[Site | SitePlan] = (),
    attention: Attention | None = None,
    on_weights: WeightsHook | None = None,
) -> Iterator[None]:
    """Pass the heads of every attention through `on_output`, before the output projection.

    Works in training and in evaluation. The model itself is not modified. Heads on which no output of a graph depends,
    by the last `find_sites` of the model, are left alone.

    Args:
        model: a transformers model, bare or wrapped for training (DistributedDataParallel).
        sites: the sites of the model or of a plan. Those outside the attention interface are hooked if they are among
            them; those of the interface always are.
        attention: run every attention as `eager` or `sdpa`; None: as configured.
        on_weights: receives every call with its attention map; needs eager attention.

    Raises:
        SiteRefusedError: the family does not support SDPA, or, on a call, returns no attention map for `on_weights`.
    """

    unread = unread_sites(unwrap(model))

    def on_call(call: Call) -> tuple[Tensor, Tensor | None]:
        output, weights = call.run()
        if call.site in unread:
            return output, weights
        if on_weights is not None:
            if weights is None:
                text = f"{call.site}: {call.implementation} attention returns no map; use attention='eager'"
                raise SiteRefusedError(text, code=ErrorCode.SITE_REFUSED, site=call.site, attention=call.implementation)
            on_weights(call, weights)
        return on_output(call.site, output), weights

    with intercepted(model, on_call, attention), hooked_projections(model, sites, on_output):
        yield


def spread_over_rows(gates: Tensor, rows: int) -> Tensor:
    """Gates `[batch, head]` in the layout of the outputs of heads: `[rows, 1, head, 1]`.

    The rows of the outputs are a multiple of those of the batch: chunked attention splits a row into several in turn.
    """
    return gates.repeat_interleave(rows // len(gates), dim=0)[:, None, :, None]
