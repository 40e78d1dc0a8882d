"""Gate a model by a plan: the torch half of the law that the gated model and the shrunk graph are one function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import InputError
from compressor.units.find import Site
from compressor.units.hook import Attention, family, hooked, unwrap
from compressor.units.masking import masked
from graph_passes import Plan, SitePlan
from graph_passes.attention.gates import GATE


def keep_only(sites: Iterable[Site], scales: Mapping[tuple[str, int], float]) -> Plan:
    """The plan that keeps the heads (site, id) of `scales`, each at its scale."""
    entries = []
    for site in sites:
        kept = tuple(head for head in range(site.heads) if (site.name, head) in scales)
        scale = tuple(scales[site.name, head] for head in kept)
        entries.append(SitePlan(site.name, site.kind, site.heads, site.kv_heads, site.head_dim, kept, scale))
    return Plan(sites=tuple(entries))


def keep_all(sites: Sequence[Site]) -> Plan:
    """The plan that keeps every head at scale one."""
    return keep_only(sites, {(site.name, head): 1.0 for site in sites for head in range(site.heads)})


def check_plan(plan: Plan, sites: Sequence[Site]) -> None:
    """Raise InputError unless `plan` names exactly these sites with their kinds and sizes."""
    found = {site.name: site for site in sites}
    planned = {site.name: site for site in plan.sites}
    for name in planned:
        if name not in found:
            raise InputError(
                f"plan: the model has no attention site {name}, its sites are {_some(found)}; give a plan that was"
                " learned on this model"
            )
    for name, site in found.items():
        if name not in planned:
            raise InputError(f"plan: site {name} of the model is missing; give every site an entry")
        for field in ("kind", "heads", "kv_heads", "head_dim"):
            has, says = getattr(site, field), getattr(planned[name], field)
            if has != says:
                raise InputError(
                    f"plan: {name}: {field} is {says} there, {has} in the model; give a plan that was learned on this"
                    " model"
                )


@contextmanager
def gated(model: PreTrainedModel, plan: Plan, *, attention: Attention | None = None) -> Iterator[PreTrainedModel]:
    """The model with every head multiplied by its gate: the scale of a kept head, zero for the rest; and every site
    that has a mask attending by it (`masked`).

    Inside the context each site carries a buffer `head_gate` `[heads, 1]`, so an export holds it as an initializer.
    Afterwards the model is as it was: same modules, same state dict, same configuration.

    Args:
        model: a transformers model.
        plan: one entry a site of this model.
        attention: run every attention as `eager` or `sdpa`; None: as the family itself would.

    Raises:
        InputError: the plan names a site that the model lacks, leaves one out, or differs in a site's heads. What can
            only be seen on a call is raised by the call.
    """
    bare = unwrap(model)
    modules = dict(bare.named_modules())
    for site in plan.sites:
        if site.name not in modules:
            raise InputError(
                f"plan: {family(bare)} has no module {site.name}; give a plan that was learned on this model"
            )
        if hasattr(modules[site.name], GATE):
            raise InputError(f"plan: {site.name} is gated already; leave the other context first")
    planned = {site.name: site for site in plan.sites}

    def multiply(name: str, out: Tensor) -> Tensor:
        site = planned.get(name)
        if site is None:
            raise InputError(f"plan: site {name} of the model is missing; give every site an entry")
        if tuple(out.shape[2:]) != (site.heads, site.head_dim):
            raise InputError(
                f"plan: {name}: {site.heads} heads of {site.head_dim} there, {out.shape[2]} of {out.shape[3]} in the "
                "model; give a plan that was learned on this model"
            )
        return out * getattr(modules[name], GATE)

    with ExitStack() as undo:
        for site in plan.sites:
            module = modules[site.name]
            # The module's own weights say where its output will be and in which precision.
            weight = next((tensor for tensor in module.parameters() if tensor.is_floating_point()), None)
            dtype, device = (bare.dtype, bare.device) if weight is None else (weight.dtype, weight.device)
            module.register_buffer(GATE, torch.tensor(site.gate, dtype=dtype, device=device)[:, None], persistent=False)
            undo.callback(delattr, module, GATE)
        undo.enter_context(hooked(model, multiply, attention=attention))
        if plan.masks:
            undo.enter_context(masked(model, plan, attention=attention))
        yield model


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
