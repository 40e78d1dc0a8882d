"""Groups of units that can be pruned: the heads of each attention, and the neurons of each feed-forward.

Feed-forwards are recognized by what they compute, with no list of families. A linear ends a feed-forward if an earlier
linear of the same layer computes its inputs, index by index, and nothing else reads them: if inputs are multiplied by
zero, the corresponding outputs of the earlier linear can have any value without an effect on the model.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel
from transformers.exporters.utils import get_leaf_tensors

from compressor.config.values import GroupBy
from compressor.errors import ErrorCode, SiteRefusedError, UsageError
from compressor.units.find import SUPPORTED, evaluation_mode, find_units
from compressor.units.hook import Attention, Call, family, intercepted, unwrap
from compressor.units.layers import (
    Linear,
    is_close,
    is_linear,
    linear_at,
    linear_sizes,
    outermost_layers,
    removed_afterwards,
)
from compressor.units.projections import hooked_projections
from compressor.units.prunable import KnowsGroups, PrunableGroup, Site, known_groups
from graph_passes.plan import GroupPlan, SitePlan

logger = logging.getLogger(__name__)
MAX_FUSED = 2
"""Maximum number of projections that one linear fuses: a gate and the values that it multiplies."""
_TOLERANCE = 1e-6
"""Largest change of an output, relative to its largest magnitude, that counts as none."""


def linear_of(model: nn.Module, group: PrunableGroup) -> Linear:
    """The linear that a group ends in."""
    assert group.linear is not None
    return linear_at(model, group.linear)


def find_groups(
    model: nn.Module, inputs: Mapping[str, Tensor], *, attention: Attention | None = None, group_by: GroupBy = "kv"
) -> list[PrunableGroup]:
    """The groups of a model whose units can be pruned, in the order in which a forward first calls them.

    Experts whose weights are one tensor of three axes are no linears, and are not listed; see `expert_weights`.

    Args:
        model: a transformers model; runs a few times in evaluation mode without gradients, and is restored afterwards.
        inputs: keyword arguments of its forward, e.g. `input_ids` `[batch, position]`, at least two positions long.
        attention: run every attention as `eager` or `sdpa`; None: as configured.
        group_by: how query heads that share key/value heads are removed: all those of a key/value head together (`kv`),
            or as many from every key/value head (`query`).

    Returns:
        One entry for each attention, whose units are its query heads, and for each feed-forward, whose units are its
        neurons.

    Raises:
        SiteRefusedError: no heads and no neurons were found, or an attention cannot be run in this form.
        InputError: the model does not run on the inputs, or is no transformers model.
        UsageError: `attention` is neither `eager` nor `sdpa`, or `group_by` neither `kv` nor `query`.
    """
    if group_by not in get_args(GroupBy):
        text = f"group_by {group_by!r}: unknown; use {' or '.join(map(repr, get_args(GroupBy)))}"
        raise UsageError(text, code=ErrorCode.UNKNOWN_NAME, field="group_by", value=group_by)
    bare = unwrap(model)
    if isinstance(bare, KnowsGroups):
        return known_groups(bare, group_by)
    units = find_units(bare, inputs, attention=attention)
    with evaluation_mode(bare), torch.no_grad():
        trace = trace_calls(bare, units.sites, inputs, attention)
        linears = trace.output_projections
        groups = [PrunableGroup.of_heads(site, linears.get(site.name), group_by) for site in units.sites]
        ends = _feed_forward_ends(bare, inputs, trace, units.read)
        groups += [PrunableGroup.of_neurons(call.name, linear_sizes(call.module)[0]) for call in ends]
    if not groups:
        text = (
            f"{family(bare)}: neither heads of an attention nor neurons of a feed-forward were recognized, so nothing"
            f" can be removed from it; supported families: {SUPPORTED}"
        )
        raise SiteRefusedError(text, code=ErrorCode.SITE_REFUSED, family=family(bare))
    groups.sort(key=lambda group: trace.order[group.name])
    logger.debug("%s: %d groups", family(bare), len(groups))
    return groups


def expert_weights(model: nn.Module, groups: Sequence[PrunableGroup]) -> tuple[str, ...]:
    """The modules outside attentions and convolutions with a weight of three axes: experts, which are no groups."""
    modules = dict(unwrap(model).named_modules())
    known = [f"{group.site.name}." for group in groups if group.site is not None]
    known += [f"{name}." for name, module in modules.items() if isinstance(module, _ConvNd)]
    return tuple(
        name
        for name, module in modules.items()
        if any(weight.dim() == 3 and min(weight.shape) > 1 for weight in module.parameters(recurse=False))
        and not any(f"{name}.".startswith(part) or part.startswith(f"{name}.") for part in known)
    )


def _feed_forward_ends(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], trace: Trace, read: Collection[str]
) -> Iterator[TracedLinear]:
    """The linears among `read` that read neurons which an earlier linear of the same layer computes for them alone."""
    linears = trace.feed_forward_linears
    for number, reader in enumerate(linears):
        units, _ = linear_sizes(reader.module)
        producers: dict[Linear, int] = {}
        for earlier in linears[:number]:
            fused, rest = divmod(linear_sizes(earlier.module)[1], units)
            if earlier.layer == reader.layer and not rest and 0 < fused <= MAX_FUSED:
                producers[earlier.module] = fused
        if reader.name in read and producers and _reads_units(model, inputs, reader.module, producers):
            yield reader


def _reads_units(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], reader: Linear, producers: Mapping[Linear, int]
) -> bool:
    """Whether outputs of a producer have no effect while the inputs of `reader` that they lead to are zero.

    In a linear that fuses a gate with the values, the two outputs of a unit are half of its width apart, or neighbours.
    """
    dropped = torch.arange(linear_sizes(reader)[0], device=reader.weight.device) % 2 == 0

    def disturb(generator: torch.Generator, columns: Tensor, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        # Noise as large as the outputs, at least one: less would have no visible effect on large activations.
        noise = torch.randn(output.shape, generator=generator).to(output) * output.abs().mean().clamp(1, 1e3)
        return torch.where(columns, output + noise, output)

    with reader.register_forward_pre_hook(lambda _, args: (args[0].masked_fill(dropped, 0), *args[1:])):
        expected = float_outputs(model, inputs)
        for producer, fused in producers.items():
            generator = torch.Generator().manual_seed(0)
            for columns in (dropped.repeat(fused), dropped.repeat_interleave(fused))[:fused]:
                with producer.register_forward_hook(partial(disturb, generator, columns)):
                    outputs = float_outputs(model, inputs)
                # A model of speech predicts how many frames it returns, so that shapes may differ.
                if all(is_close(actual, value, _TOLERANCE) for actual, value in zip(outputs, expected, strict=False)):
                    return True
    return False


@dataclass(frozen=True)
class Bundles:
    """The units of a group in bundles that are kept or dropped together, `group.multiple` units each.

    Any subset of the bundles keeps a number of units that `group.counts` has. Units that are left over belong to no
    bundle, and are kept only if all units are kept.

    Attributes:
        group: the group; heads have one part.
        order: ids of all units; each bundle is a run of them.
    """

    group: PrunableGroup
    order: tuple[int, ...]

    @classmethod
    def of_site(cls, site: Site) -> Bundles:
        """Every head of an attention alone."""
        group = PrunableGroup(site.name, "heads", site.heads, site.head_dim, 1, None, site)
        return cls(group, tuple(range(site.heads)))

    @property
    def name(self) -> str:
        """Name of the group."""
        return self.group.name

    @property
    def count(self) -> int:
        """Number of bundles."""
        return self.group.units // self.group.multiple

    @functools.cached_property
    def _bundle_of(self) -> Tensor:
        """The bundle of each unit, `[units]`; `count` for units that are left over."""
        bundles = torch.empty(self.group.units, dtype=torch.int64)
        bundles[list(self.order)] = torch.arange(self.group.units) // self.group.multiple
        return bundles

    def spread(self, gates: Tensor) -> Tensor:
        """The gate of each unit, `[units]`, from those of the bundles, `[bundles]`; the least for those left over."""
        if self.count * self.group.multiple < self.group.units:
            gates = torch.cat([gates, gates.amin(0, keepdim=True)])
        return gates[self._bundle_of.to(gates.device)]

    def plan(self, gates: Tensor) -> GroupPlan:
        """The plan that keeps the bundles whose gate `[bundles]` is not zero, at their gates."""
        units = self.spread(gates).tolist()
        kept = [unit for unit, gate in enumerate(units) if gate != 0]
        return dataclasses.replace(self.group.plan(kept), scale=tuple(units[unit] for unit in kept))


@dataclass(frozen=True)
class TracedLinear:
    """The first call of a linear in a forward."""

    name: str
    module: Linear
    layer: int


@dataclass(frozen=True)
class Trace:
    """The modules that one forward calls.

    Attributes:
        linears: the linears inside layers, in the order of their first calls.
        output_projections: name of the site -> name of the linear that reads its heads.
        order: names of sites and linears in the order of their first calls.
    """

    linears: list[TracedLinear]
    output_projections: dict[str, str]
    order: dict[str, int]

    @property
    def feed_forward_linears(self) -> list[TracedLinear]:
        """The linears inside layers that belong to no attention, in the order of their first calls."""
        projections = frozenset(self.output_projections.values())
        sites = tuple(f"{site}." for site in self.output_projections)
        return [call for call in self.linears if call.name not in projections and not call.name.startswith(sites)]


def trace_calls(
    model: PreTrainedModel, sites: Iterable[Site | SitePlan], inputs: Mapping[str, Tensor], attention: Attention | None
) -> Trace:
    """Run the model once on inputs, and record the order of its attentions, the sites, and linears.

    `attention` runs every attention as `eager` or `sdpa`; None: as configured.
    """
    trace = Trace([], {}, {})
    modules = dict(model.named_modules())
    layer_of = {module: number for number, layer in enumerate(outermost_layers(model)) for module in layer.modules()}
    pending: list[tuple[str, int]] = []  # sites whose output projection was not called yet, and its inputs

    def on_attention(call: Call) -> tuple[Tensor, Tensor | None]:
        output, weights = call.run()
        trace.order.setdefault(call.site, len(trace.order))
        pending[:] = [(call.site, output.shape[2] * output.shape[3])]
        return output, weights

    def on_projection(name: str, heads: Tensor) -> Tensor:
        trace.order.setdefault(name, len(trace.order))
        if is_linear(modules[name]):
            trace.output_projections[name] = name
        return heads

    def on_linear(name: str, module: Linear, _: Any) -> None:
        while pending:
            site, size = pending.pop()
            if size == linear_sizes(module)[0]:
                trace.output_projections.setdefault(site, name)
        if name not in trace.order:
            trace.order[name] = len(trace.order)
            if module in layer_of:
                trace.linears.append(TracedLinear(name, module, layer_of[module]))

    linears = ((name, module) for name, module in modules.items() if is_linear(module))
    with (
        removed_afterwards(module.register_forward_pre_hook(partial(on_linear, name)) for name, module in linears),
        hooked_projections(model, sites, on_projection),
        intercepted(model, on_attention, attention),
    ):
        model(**inputs)
    return trace


def float_outputs(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Every floating-point output of a forward."""
    tensors = get_leaf_tensors(model(**inputs)).values()
    return [tensor for tensor in tensors if tensor.is_floating_point()]
