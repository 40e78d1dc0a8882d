"""Compute a gated model with smaller linears, so that training it costs a fraction."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.units.closeness import is_close
from compressor.units.find import evaluation_mode, find_units
from compressor.units.gating import check_no_site_is_missing, gated
from compressor.units.hook import Call, family, intercepted, unwrap
from compressor.units.slices import sliced
from compressor.units.small_groups import SmallGroup, small_forms
from compressor.units.trace import float_outputs, trace_calls
from graph_passes.plan import Plan

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-5
"""Largest difference from the gated model, relative to the largest magnitude, that counts as rounding in float32."""
_ROUNDING = 8
"""Number of machine epsilons that count as rounding in a less precise type."""


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

    Yields:
        Which groups have smaller parameters.

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
    with ExitStack() as undo:
        undo.enter_context(
            sliced([part for form in forms for part in form.slices], [size for form in forms for size in form.sizes])
        )
        undo.enter_context(gated(model, plan.replace_groups(form.plan for form in forms)))
        undo.enter_context(intercepted(model, partial(_run_with_fewer_heads, _heads_by_site(plan, forms)), None))
        yield


def _heads_by_site(plan: Plan, forms: Iterable[SmallGroup]) -> dict[str, tuple[int, Tensor]]:
    """Name of the site -> its number of heads in the full model, and the ids of those that remain."""
    return {form.plan.name: (plan[form.plan.name].units, form.units) for form in forms if form.plan.type == "heads"}


def _run_with_fewer_heads(heads: Mapping[str, tuple[int, Tensor]], call: Call) -> tuple[Tensor, Tensor | None]:
    """Run an attention call whose mask, or bias of positions, may be of all heads of the full model."""
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
    """Compares smaller forms with the gated model on example inputs.

    Args:
        model: the model, in evaluation mode.
        plan: the plan.
        inputs: keyword arguments of its forward.
        forms: the forms of each group; those of one group read the same inputs of the same linear.
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
        return len(expected) == len(actual) and all(map(_is_equal, actual, expected))

    def _run(self, readers: Mapping[nn.Module, Tensor | None]) -> tuple[list[Tensor], dict[nn.Module, list[Tensor]]]:
        """The outputs of a forward, and these columns of the inputs of linears, or all, call by call."""
        read: dict[nn.Module, list[Tensor]] = {reader: [] for reader in readers}

        def record(linear: nn.Module, args: tuple[Any, ...]) -> None:
            columns = readers[linear]
            read[linear].append(args[0] if columns is None else args[0].index_select(-1, columns.to(args[0].device)))

        with ExitStack() as undo:
            for reader in readers:
                undo.enter_context(reader.register_forward_pre_hook(record))
            return float_outputs(self._model, self._inputs), read


def _is_equal(actual: Tensor, expected: Tensor) -> bool:
    """Whether tensors are equal up to rounding in their type."""
    return is_close(actual, expected, max(_TOLERANCE, _ROUNDING * torch.finfo(expected.dtype).eps))


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
