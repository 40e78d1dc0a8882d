"""Compute a gated model with smaller linears, so that training it costs a fraction."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from compressor.units.find import evaluation_mode, find_units
from compressor.units.gating import gated
from compressor.units.groups import MAX_FUSED, Trace, TracedLinear, float_outputs, trace_calls
from compressor.units.hook import Call, family, intercepted, unwrap
from compressor.units.layers import Linear, is_close, is_linear, linear_sizes, removed_afterwards
from compressor.units.prunable import check_no_site_is_missing
from graph_passes.plan import GroupPlan, NeuronPlan, Plan, SitePlan

logger = logging.getLogger(__name__)
_TOLERANCE = 1e-5
"""Largest difference from the gated model, relative to the largest magnitude, that counts as rounding in float32."""
_ROUNDING = 8
"""Number of machine epsilons that count as rounding in a less precise type."""
_PROJECTIONS = (("query",), ("key",), ("query", "key", "key"), ("key", "key"))
"""Projections that one linear of an attention may compute together; a value projection keeps the same rows as the key
projection."""
Producer = tuple[Linear, Sequence[Tensor], Sequence[int]]
"""A linear that computes units; by projection that it fuses, ids of the units that stay, and number of all units."""
Resize = tuple[nn.Module, str, int]
"""A module, an attribute of it that holds a size, and the new size."""
_KEY_VALUE_GROUPS = "num_key_value_groups"
"""Attribute of attention modules: query heads for each key/value head."""


@dataclass(frozen=True)
class Compaction:
    """How the groups of a plan that drop units are computed.

    Attributes:
        compacted: names of the groups without their dropped units.
        gated: names of the groups whose dropped units are computed and multiplied by zero.
    """

    compacted: tuple[str, ...]
    gated: tuple[str, ...]


@contextmanager
def compacted(model: PreTrainedModel, plan: Plan, inputs: Mapping[str, Tensor]) -> Iterator[Compaction]:
    """The function of `gated(model, plan)`, with smaller parameters wherever a group can have them.

    Linears that compute units lose the outputs of dropped ones, and linears that read units the inputs. The smaller
    form of a group is used only if, on `inputs`, the model's outputs and what the group's units pass on equal those of
    the gated model up to rounding; other groups stay gated. A site with a block mask stays gated.

    Inside the context, the state dict has the usual names and smaller tensors. An optimizer is to be made inside. On
    exit, also after an error, every parameter is the same object as before, has its full shape and, where units were
    kept, the trained values; dropped units have their former values. A full parameter has no gradient from inside.

    Args:
        model: a transformers model; runs a few times in evaluation mode without gradients.
        plan: one entry for each site of the model, and for feed-forwards.
        inputs: keyword arguments of its forward, on the device of the model.

    Raises:
        InputError: the plan lacks a site of the model; see also `gated`.
    """
    bare = unwrap(model)
    check_no_site_is_missing(plan, find_units(bare, inputs).sites)
    with evaluation_mode(bare), torch.no_grad():
        forms = small_forms(bare, plan, trace_calls(bare, plan.sites, inputs, None))
        chosen = _chosen_forms(_Check(bare, plan, inputs, forms), forms)
    names = [form.plan.name for form in chosen]
    dropping = [group.name for group in plan.groups if group.dropped]
    result = Compaction(
        tuple(name for name in dropping if name in names), tuple(name for name in dropping if name not in names)
    )
    logger.debug("%s: %d groups are compacted, %d stay gated", family(bare), len(names), len(result.gated))
    with _compacted(model, plan, chosen):
        yield result


@contextmanager
def _compacted(model: PreTrainedModel, plan: Plan, forms: Sequence[SmallGroup]) -> Iterator[None]:
    """The gated model with the smaller forms of some groups."""
    slices, sizes = [part for form in forms for part in form.slices], [size for form in forms for size in form.sizes]
    heads = {form.plan.name: (plan[form.plan.name].units, form.units) for form in forms if form.plan.type == "heads"}
    with (
        sliced(slices, sizes),
        gated(model, plan.replace_groups(form.plan for form in forms)),
        intercepted(model, partial(_run_with_fewer_heads, heads), None),
    ):
        yield


def _run_with_fewer_heads(heads: Mapping[str, tuple[int, Tensor]], call: Call) -> tuple[Tensor, Tensor | None]:
    """Run an attention call whose mask, or bias of positions, may be of all heads of the full model.

    By name of the site, `heads` are their number there, and the ids of those that remain.
    """
    if call.site not in heads:
        return call.run()
    count, remaining = heads[call.site]

    def reduce(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() == 4 and value.shape[1] == count:
            return value.index_select(1, remaining.to(value.device))
        return value

    options = {name: reduce(value) for name, value in call.options.items()}
    return replace(call, mask=reduce(call.mask), options=options).run()


class _Check:
    """Compares smaller forms with the gated model, in evaluation mode, on example inputs.

    The forms of one group read the same inputs of the same linear.
    """

    def __init__(
        self, model: PreTrainedModel, plan: Plan, inputs: Mapping[str, Tensor], forms: Mapping[str, list[SmallGroup]]
    ) -> None:
        self._model, self._plan, self._inputs = model, plan, inputs
        readers: dict[nn.Module, Tensor | None] = {form.reader: form.columns for form, *_ in forms.values()}
        with gated(model, plan):
            self._outputs, self._read = self._run(readers)

    def passes(self, forms: Sequence[SmallGroup]) -> bool:
        """Whether the model with these forms computes what the gated model does."""
        try:
            with _compacted(self._model, self._plan, forms):
                outputs, read = self._run({form.reader: None for form in forms})
        except Exception as error:  # a wrong form can fail anywhere in the code of the family
            logger.debug("a smaller form fails: %s", error)
            return False
        expected = [*self._outputs, *(value for reader in read for value in self._read[reader])]
        actual = [*outputs, *(value for values in read.values() for value in values)]
        return len(expected) == len(actual) and all(  # up to rounding in their type
            is_close(value, reference, max(_TOLERANCE, _ROUNDING * torch.finfo(reference.dtype).eps))
            for value, reference in zip(actual, expected, strict=True)
        )

    def _run(self, readers: Mapping[nn.Module, Tensor | None]) -> tuple[list[Tensor], dict[nn.Module, list[Tensor]]]:
        """The outputs of a forward, and call by call these columns, or all, of the inputs of linears."""
        read: dict[nn.Module, list[Tensor]] = {reader: [] for reader in readers}

        def record(linear: nn.Module, args: tuple[Any, ...]) -> None:
            columns = readers[linear]
            read[linear].append(args[0] if columns is None else args[0].index_select(-1, columns.to(args[0].device)))

        with removed_afterwards(reader.register_forward_pre_hook(record) for reader in readers):
            return float_outputs(self._model, self._inputs), read


def _chosen_forms(check: _Check, forms: Mapping[str, Sequence[SmallGroup]]) -> list[SmallGroup]:
    """A form that passes for as many groups as possible; all of them together pass."""
    chosen: list[SmallGroup] = []
    for number in range(max(map(len, forms.values()), default=0)):
        done = {form.plan.name for form in chosen}
        rest = [options[number] for name, options in forms.items() if name not in done and number < len(options)]
        chosen = _extended(check, chosen, rest)
    return chosen


def _extended(check: _Check, chosen: list[SmallGroup], candidates: Sequence[SmallGroup]) -> list[SmallGroup]:
    """The chosen forms and those of the candidates that pass with them, found by bisection."""
    if not candidates or check.passes([*chosen, *candidates]):
        return [*chosen, *candidates]
    if len(candidates) == 1:
        return chosen
    middle = len(candidates) // 2
    return _extended(check, _extended(check, chosen, candidates[:middle]), candidates[middle:])


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
        slices, sizes: the parameters to slice, and the attributes to change.
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
    # More than one module holds a weight that is tied.
    holders = Counter(weight for module in model.modules() for weight in module.parameters(recurse=False))
    modules = dict(model.named_modules())
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
    fused = {call.module: linear_sizes(call.module)[1] // group.units for call in producers}
    parts = [(linear, [kept] * count, [group.units] * count) for linear, count in fused.items()]
    yield from _forms(small, reader.module, kept, kept, parts, 1)


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
    counts = {"query": site.heads, "key": site.kv_heads}
    remaining = {"query": torch.tensor(queries), "key": torch.tensor(keys)}
    producers: list[Producer] = []
    for name, linear in modules.items():
        precedes = trace.order.get(name, len(trace.order)) < trace.order[site.name]
        if not precedes or not name.startswith(f"{site.name}.") or not is_linear(linear) or linear is reader:
            continue
        heads = linear_sizes(linear)[1] / site.head_dim
        projections = next((names for names in _PROJECTIONS if sum(counts[part] for part in names) == heads), ())
        if projections:
            producers.append((linear, [remaining[p] for p in projections], [counts[p] for p in projections]))
    assert is_linear(reader)
    columns = _fused_rows([remaining["query"]], [site.heads], site.head_dim)
    for form in _forms(small, reader, columns, remaining["query"], producers, site.head_dim):
        yield from _with_attention(form, module, site, small)


def _remaining_heads(site: SitePlan) -> tuple[list[int], list[int]]:
    """The query heads and the key/value heads that stay.

    A key/value head stays if a kept query head uses it. Each has as many query heads as the one with the most kept.
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


def _fused_rows(kept: Sequence[Tensor], units: Sequence[int], width: int, *, interleaved: bool = False) -> Tensor:
    """The outputs that stay of a linear that fuses projections, ascending.

    Each projection has so many `units` of `width` outputs, of which those in `kept` stay. If `interleaved`, the outputs
    of a unit in all projections are neighbours, else all outputs of a projection.
    """
    if interleaved:
        return _fused_rows(kept[:1], units[:1], width * len(kept))
    starts = [sum(units[:number]) for number in range(len(units))]
    ids = torch.cat([part + start for part, start in zip(kept, starts, strict=True)])
    return (ids[:, None] * width + torch.arange(width)).flatten()


def _forms(
    plan: GroupPlan, reader: Linear, columns: Tensor, units: Tensor, producers: Sequence[Producer], width: int
) -> Iterator[SmallGroup]:
    """The forms in which producers have the outputs of units that stay only, of `width` outputs for each unit."""
    if not producers:
        return
    is_fused = any(len(kept) > 1 for _, kept, _ in producers)
    for interleaved in (False, True) if is_fused else (False,):
        changes = [_smaller(reader, columns, outputs=False)]
        for linear, kept, counts in producers:
            rows = _fused_rows(kept, counts, width, interleaved=interleaved)
            changes.append(_smaller(linear, rows, outputs=True))
        slices = tuple(part for parts, _ in changes for part in parts)
        yield SmallGroup(plan, reader, columns, units, slices, tuple(size for _, size in changes))


def _with_attention(form: SmallGroup, module: nn.Module, site: SitePlan, small: SitePlan) -> Iterator[SmallGroup]:
    """The form with the parameters and attributes of the attention module that depend on the number of heads.

    Most families infer the number of heads from the width of a projection, and T5 gives later layers a tensor with the
    number of heads of the first, so the first form leaves the attributes as they are.
    """
    parameters = [
        Slice(module, name, 0, form.units)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.shape[:1] == (site.heads,)
    ]
    groups: list[Resize] = [(module, _KEY_VALUE_GROUPS, small.heads // small.kv_heads)]
    sizes = (*form.sizes, *(groups if site.kv_heads < site.heads and hasattr(module, _KEY_VALUE_GROUPS) else ()))
    form = replace(form, slices=(*form.slices, *parameters), sizes=sizes)
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
            yield module, name, sizes[value]


@dataclass(frozen=True, eq=False)
class Slice:
    """The entries of a parameter of a module along one axis that remain, by their indices `[entries]`, ascending."""

    module: nn.Module
    parameter: str
    axis: int
    kept: Tensor


def _smaller(linear: Linear, kept: Tensor, *, outputs: bool) -> tuple[list[Slice], Resize]:
    """The changes that reduce the outputs of a linear, and its bias, to `kept`, or its inputs."""
    transposed = isinstance(linear, Conv1D)
    slices = [Slice(linear, "weight", int(transposed == outputs), kept)]
    if outputs and linear.bias is not None:
        slices.append(Slice(linear, "bias", 0, kept))
    names = ("nx", "nf") if transposed else ("in_features", "out_features")
    return slices, (linear, names[outputs], len(kept))


@contextmanager
def sliced(slices: Iterable[Slice], sizes: Iterable[Resize]) -> Iterator[None]:
    """Modules whose parameters are smaller, contiguous ones that require gradients as the full ones do.

    On exit, also after an error, every module has its full parameter again, the same object, with the values of the
    smaller one at the entries that remained. The full parameter is moved to the device of the smaller one. There is at
    most one slice for each axis of a parameter; `sizes` are attributes to change meanwhile.
    """
    by_parameter: dict[tuple[nn.Module, str], list[Slice]] = defaultdict(list)
    for part in slices:
        by_parameter[part.module, part.parameter].append(part)
    with ExitStack() as undo:
        for (module, name), parts in by_parameter.items():
            undo.enter_context(_sliced_parameter(module, name, parts))
        for module, attribute, value in sizes:
            undo.callback(setattr, module, attribute, getattr(module, attribute))
            setattr(module, attribute, value)
        yield


@contextmanager
def _sliced_parameter(module: nn.Module, name: str, parts: Iterable[Slice]) -> Iterator[None]:
    full = module.get_parameter(name)
    small: Tensor = full.detach()
    for part in parts:
        small = small.index_select(part.axis, part.kept.to(small.device))
    setattr(module, name, nn.Parameter(small.contiguous(), requires_grad=full.requires_grad))
    try:
        yield
    finally:
        # A loaded checkpoint can have replaced the smaller parameter.
        trained = module.get_parameter(name).detach()
        setattr(module, name, full)
        if full.device != trained.device:
            full.data = full.data.to(trained.device)
        axes = [torch.arange(size, device=full.device) for size in full.shape]
        for part in parts:
            axes[part.axis] = part.kept.to(full.device)
        full.data[torch.meshgrid(axes, indexing="ij")] = trained.to(full.dtype)
