"""Gate a PyTorch model by a plan: the reference for the function of the shrunk graph."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, InputError
from compressor.units.find import Site
from compressor.units.hook import Attention, family, hooked, unwrap
from compressor.units.masking import masked
from graph_passes import Plan, SitePlan
from graph_passes.attention.gate_initializers import GATE_NAME

logger = logging.getLogger(__name__)

_SIZES = ("kind", "heads", "kv_heads", "head_dim")
"""Fields in which a plan and a model must agree on a site."""


def keep_only(sites: Iterable[Site], scales: Mapping[tuple[str, int], float]) -> Plan:
    """The plan that keeps the heads in `scales`, by site name and head index, each at its scale."""
    entries = []
    for site in sites:
        kept = tuple(head for head in range(site.heads) if (site.name, head) in scales)
        scale = tuple(scales[site.name, head] for head in kept)
        entries.append(SitePlan(site.name, site.kind, site.heads, site.kv_heads, site.head_dim, kept, scale))
    return Plan(sites=tuple(entries))


def keep_all(sites: Sequence[Site]) -> Plan:
    """The plan that keeps every head at scale one."""
    return keep_only(sites, {(site.name, head): 1.0 for site in sites for head in range(site.heads)})


def check_plan(plan: Plan, sites: Sequence[Site], *, source: str = "plan") -> None:
    """Check that a plan has an entry for every site of a model and for nothing else, with equal kinds and sizes.

    Args:
        plan: the plan.
        sites: the sites of the model.
        source: origin of the plan, for the error message.

    Raises:
        InputError: an entry is missing, superfluous or different.
    """
    in_model = {site.name: site for site in sites}
    in_plan = {site.name: site for site in plan.sites}
    for name in in_plan:
        if name not in in_model:
            raise InputError(
                f"{source}: the model has no attention site {name}, its sites are {_first_names(in_model)}; use a plan"
                " that was learned on this model",
                code=ErrorCode.PLAN_MISMATCH,
                site=name,
            )
    for name, site in in_model.items():
        if name not in in_plan:
            raise _missing_site(name, source)
        for field in _SIZES:
            actual, planned = getattr(site, field), getattr(in_plan[name], field)
            if actual != planned:
                raise InputError(
                    f"{source}: {name}: {field} is {planned} in the plan, {actual} in the model; use a plan that was"
                    " learned on this model",
                    code=ErrorCode.PLAN_MISMATCH,
                    site=name,
                    field=field,
                    planned=planned,
                    actual=actual,
                )


@contextmanager
def gated(model: PreTrainedModel, plan: Plan, *, attention: Attention | None = None) -> Iterator[PreTrainedModel]:
    """The model with every head multiplied by its gate: the scale of a kept head, zero for a dropped one.

    Block masks of the plan are applied too; see `masked`. Inside the context, each site has a buffer
    `head_gate` `[heads, 1]`, which becomes an initializer of an exported graph. On exit the model is restored: the
    same modules, state dict and configuration.

    Args:
        model: a transformers model.
        plan: one entry for each site of the model.
        attention: run every attention as `eager` or `sdpa`; None: as configured.

    Raises:
        InputError: the plan names a site that the model lacks, or the model is gated already; on a call, if the plan
            lacks a site of the model or has other sizes.
    """
    bare = unwrap(model)
    modules = dict(bare.named_modules())
    for site in plan.sites:
        _check_module(site.name, modules, bare)
    planned = {site.name: site for site in plan.sites}

    def multiply(name: str, output: Tensor) -> Tensor:
        if name not in planned:
            raise _missing_site(name, "plan")
        _check_output(planned[name], output)
        return output * getattr(modules[name], GATE_NAME)

    with ExitStack() as undo:
        for site in plan.sites:
            module = modules[site.name]
            # The output of a module has the device and the type of its weights.
            weight = next((tensor for tensor in module.parameters() if tensor.is_floating_point()), None)
            dtype, device = (bare.dtype, bare.device) if weight is None else (weight.dtype, weight.device)
            module.register_buffer(
                GATE_NAME, torch.tensor(site.gate, dtype=dtype, device=device)[:, None], persistent=False
            )
            undo.callback(delattr, module, GATE_NAME)
        undo.enter_context(hooked(model, multiply, attention=attention))
        if plan.masks:
            undo.enter_context(masked(model, plan, attention=attention))
        logger.debug("%s: %d heads kept at %d sites", family(bare), plan.heads_kept, len(plan.sites))
        yield model


def _check_module(name: str, modules: Mapping[str, nn.Module], model: PreTrainedModel) -> None:
    """Raise InputError unless a gate can be attached to the module of a site."""
    if name not in modules:
        raise InputError(
            f"plan: {family(model)} has no module {name}; use a plan that was learned on this model",
            code=ErrorCode.PLAN_MISMATCH,
            site=name,
        )
    if hasattr(modules[name], GATE_NAME):
        raise InputError(
            f"plan: {name} is gated already; leave the other context first", code=ErrorCode.CONTRADICTION, site=name
        )


def _check_output(site: SitePlan, output: Tensor) -> None:
    """Raise InputError unless an output `[batch, query, head, head_dim]` has the sizes of the plan."""
    heads, head_dim = output.shape[2:]
    if (heads, head_dim) != (site.heads, site.head_dim):
        raise InputError(
            f"plan: {site.name}: {site.heads} heads of {site.head_dim} in the plan, {heads} of {head_dim} in the"
            " model; use a plan that was learned on this model",
            code=ErrorCode.PLAN_MISMATCH,
            site=site.name,
            planned=(site.heads, site.head_dim),
            actual=(heads, head_dim),
        )


def _missing_site(name: str, source: str) -> InputError:
    """The error for a site of the model that a plan lacks."""
    return InputError(
        f"{source}: site {name} of the model is missing; add an entry for every site",
        code=ErrorCode.PLAN_MISMATCH,
        site=name,
    )


def _first_names(names: Iterable[str], limit: int = 3) -> str:
    """At most `limit` names as text, and the number of the others."""
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
