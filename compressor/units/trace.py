"""One forward of a model: the order of its attentions and linears, and its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.exporters.utils import get_leaf_tensors

from compressor.units.hook import Attention, Call, intercepted
from compressor.units.layers import Linear, is_linear, linear_sizes, outermost_layers
from compressor.units.projections import Heads, hooked_projections


@dataclass(frozen=True)
class TracedLinear:
    """The first call of a linear in a forward."""

    name: str
    module: Linear
    layer: int


@dataclass(frozen=True)
class Trace:
    """What one forward calls.

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
    model: PreTrainedModel, sites: Iterable[Heads], inputs: Mapping[str, Tensor], attention: Attention | None
) -> Trace:
    """Run the model once and record the order of its attentions and linears.

    Args:
        model: the model.
        sites: its sites.
        inputs: keyword arguments of its forward.
        attention: run every attention as `eager` or `sdpa`; None: as configured.
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

    with ExitStack() as undo:
        for name, module in modules.items():
            if is_linear(module):
                undo.enter_context(module.register_forward_pre_hook(partial(on_linear, name)))
        undo.enter_context(hooked_projections(model, sites, on_projection))
        undo.enter_context(intercepted(model, on_attention, attention))
        model(**inputs)
    return trace


def float_outputs(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Every floating-point output of a forward."""
    tensors = get_leaf_tensors(model(**inputs)).values()
    return [tensor for tensor in tensors if tensor.is_floating_point()]
