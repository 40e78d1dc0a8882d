"""The smaller forms of the groups of a model: which parameters to slice so that only the kept units are computed.

A form is a guess from names, sizes and the order of calls, which may be wrong: it is to be checked against the gated
model. No family is listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from compressor.units.groups import MAX_FUSED
from compressor.units.layers import Linear, is_linear, linear_sizes
from compressor.units.slices import Resize, Slice, input_slices, output_slices, owners
from compressor.units.trace import Trace, TracedLinear
from graph_passes.plan import GroupPlan, NeuronPlan, Plan, SitePlan

_PROJECTIONS = (("query",), ("key",), ("query", "key", "key"), ("key", "key"))
"""What one linear of an attention computes; a value projection has the rows of a key projection."""
_KEY_VALUE_GROUPS = "num_key_value_groups"
"""Attribute of attention modules: query heads for each key/value head."""


@dataclass(frozen=True, eq=False)
class SmallGroup:
    """A group without most of its dropped units, which are neither computed nor trained.

    At least one unit stays, and query heads may stay so that each key/value head has equally many; dropped units that
    stay have a gate of zero.

    Attributes:
        plan: the plan of the smaller group.
        reader: the linear that reads the units.
        columns: the inputs of `reader` that stay, `[inputs]`.
        units: the ids of the units that stay, `[units]`.
        slices: the parameters to slice.
        sizes: the attributes to change.
    """

    plan: GroupPlan
    reader: Linear
    columns: Tensor
    units: Tensor
    slices: tuple[Slice, ...]
    sizes: tuple[Resize, ...]


def small_forms(model: nn.Module, plan: Plan, trace: Trace) -> dict[str, list[SmallGroup]]:
    """Name of the group -> its possible smaller forms, the likeliest first, for the groups that can have any.

    A group has none if all its units stay, its attention maps are masked, what computes its units is not recognized,
    or a parameter to slice is tied to another or computes the units of an earlier group.
    """
    holders, modules = owners(model), dict(model.named_modules())
    taken: set[tuple[nn.Module, str, int]] = set()
    forms: dict[str, list[SmallGroup]] = {}
    for group in plan.groups:
        if isinstance(group, SitePlan):
            candidates = list(_site_forms(group, modules, trace))
        else:
            candidates = list(_neuron_forms(group, trace))
        used = {(part.module, part.parameter, part.axis) for form in candidates for part in form.slices}
        tied = any(holders[module.get_parameter(name)] > 1 for module, name, _ in used)
        if candidates and not tied and not used & taken:
            forms[group.name] = candidates
            taken |= used
    return forms


def _neuron_forms(group: NeuronPlan, trace: Trace) -> Iterator[SmallGroup]:
    linears = trace.feed_forward_linears
    reader = next((call for call in linears if call.name == group.name), None)
    units = group.kept or (0,)
    if reader is None or len(units) == group.units:
        return
    producers = _producers(reader, linears[: linears.index(reader)])
    kept = torch.tensor(units)
    small = NeuronPlan(group.name, len(units), tuple(range(len(group.kept))), group.scale)
    fused = [linear_sizes(call.module)[1] // group.units for call in producers]
    for interleaved in (False, True) if max(fused, default=1) > 1 else (False,):
        rows = [_fused_rows([kept] * parts, [group.units] * parts, 1, interleaved=interleaved) for parts in fused]
        yield from _form(small, reader.module, kept, kept, [call.module for call in producers], rows)


def _producers(reader: TracedLinear, earlier: Sequence[TracedLinear]) -> list[TracedLinear]:
    """The linears that may compute the inputs of `reader`: those of a fitting width in the nearest module around it."""
    units, _ = linear_sizes(reader.module)
    widths = [units * parts for parts in range(1, MAX_FUSED + 1)]
    fitting = [call for call in earlier if call.layer == reader.layer and linear_sizes(call.module)[1] in widths]
    scope = reader.name
    while "." in scope:
        scope = scope.rpartition(".")[0]
        if inside := [call for call in fitting if call.name.startswith(f"{scope}.")]:
            return inside
    return fitting


def _site_forms(site: SitePlan, modules: dict[str, nn.Module], trace: Trace) -> Iterator[SmallGroup]:
    queries, keys = _remaining_heads(site)
    if site.mask is not None or site.name not in trace.output_projections or len(queries) == site.heads:
        return
    module, reader = modules[site.name], modules[trace.output_projections[site.name]]
    kept = tuple(queries.index(head) for head in site.kept)
    small = replace(site, heads=len(queries), kv_heads=len(keys), kept=kept)
    query, key = torch.tensor(queries), torch.tensor(keys)
    producers, parts = [], []
    for name, linear in modules.items():
        if not name.startswith(f"{site.name}.") or not is_linear(linear) or linear is reader:
            continue
        if trace.order.get(name, len(trace.order)) < trace.order[site.name]:
            projections = _projections(site, linear_sizes(linear)[1])
            if projections is None:
                continue
            producers.append(linear)
            parts.append(projections)
    counts = {"query": site.heads, "key": site.kv_heads}
    remaining = {"query": query, "key": key}
    assert is_linear(reader)
    for interleaved in (False, True) if max(map(len, parts), default=1) > 1 else (False,):
        rows = [
            _fused_rows(
                [remaining[p] for p in names], [counts[p] for p in names], site.head_dim, interleaved=interleaved
            )
            for names in parts
        ]
        columns = _fused_rows([query], [site.heads], site.head_dim)
        for form in _form(small, reader, columns, query, producers, rows):
            yield from _with_attention(form, module, site, small)


def _remaining_heads(site: SitePlan) -> tuple[list[int], list[int]]:
    """The query heads and the key/value heads that stay.

    Key/value heads stay that a kept query head uses. Each has as many query heads as the one with the most kept.
    """
    shared = site.heads // site.kv_heads
    kept_of = {key: [head for head in site.kept if head // shared == key] for key in range(site.kv_heads)}
    keys = [key for key, kept in kept_of.items() if kept] or [0]
    count = max(1, *(len(kept_of[key]) for key in keys))
    queries: list[int] = []
    for key in keys:
        dropped = [head for head in range(key * shared, (key + 1) * shared) if head not in kept_of[key]]
        queries += sorted(kept_of[key] + dropped[: count - len(kept_of[key])])
    return queries, keys


def _projections(site: SitePlan, width: int) -> tuple[str, ...] | None:
    """What a linear with `width` outputs computes for an attention; None: its width does not fit."""
    heads = {"query": site.heads, "key": site.kv_heads}
    fitting = (names for names in _PROJECTIONS if sum(heads[name] for name in names) * site.head_dim == width)
    return next(fitting, None)


def _fused_rows(kept: Sequence[Tensor], units: Sequence[int], width: int, *, interleaved: bool = False) -> Tensor:
    """The outputs that stay of a linear that fuses projections, ascending.

    Args:
        kept: for each projection, the ids of its units that stay.
        units: for each projection, the number of its units.
        width: outputs of one unit in one projection.
        interleaved: the outputs of a unit in all projections are beside each other, not those of a projection.
    """
    if interleaved:
        return _fused_rows(kept[:1], units[:1], width * len(kept))
    starts = [sum(units[:number]) for number in range(len(units))]
    ids = torch.cat([part + start for part, start in zip(kept, starts, strict=True)])
    return (ids[:, None] * width + torch.arange(width)).flatten()


def _form(
    plan: GroupPlan,
    reader: Linear,
    columns: Tensor,
    units: Tensor,
    producers: Sequence[Linear],
    rows: Sequence[Tensor],
) -> Iterator[SmallGroup]:
    """The form in which each producer has these outputs only; none if there is no producer."""
    changes = [input_slices(reader, columns), *map(output_slices, producers, rows)]
    slices = tuple(part for parts, _ in changes for part in parts)
    sizes = tuple(size for _, resized in changes for size in resized)
    if producers:
        yield SmallGroup(plan, reader, columns, units, slices, sizes)


def _with_attention(form: SmallGroup, module: nn.Module, site: SitePlan, small: SitePlan) -> Iterator[SmallGroup]:
    """The form with the parameters and attributes that the attention module itself has for its heads.

    Most families infer the number of heads from the width of a projection, and T5 gives later layers a tensor with the
    number of heads of the first, so the first form leaves the attributes as they are.
    """
    own_parameters = [
        Slice(module, name, 0, form.units)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.shape[:1] == (site.heads,)
    ]
    groups = [Resize(module, _KEY_VALUE_GROUPS, small.heads // small.kv_heads)]
    sizes = (*form.sizes, *(groups if site.kv_heads < site.heads and hasattr(module, _KEY_VALUE_GROUPS) else ()))
    form = replace(form, slices=(*form.slices, *own_parameters), sizes=sizes)
    yield form
    if attributes := list(_size_attributes(module, site, small)):
        yield replace(form, sizes=(*form.sizes, *attributes))


def _size_attributes(module: nn.Module, site: SitePlan, small: SitePlan) -> Iterable[Resize]:
    """The attributes of an attention module that count its heads, or the channels of all heads."""
    counts = {site.kv_heads: small.kv_heads, site.heads: small.heads}
    widths = {count * site.head_dim: fewer * site.head_dim for count, fewer in counts.items()}
    for name, value in vars(module).items():
        sizes = counts if "heads" in name else widths if any(word in name for word in ("dim", "size")) else {}
        if type(value) is int and value in sizes:
            yield Resize(module, name, sizes[value])
