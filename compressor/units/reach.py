"""Which heads an output of the model depends on.

A model may compute an attention that nothing reads, such as the pooling of SigLIP in a classifier that averages the
positions. The exported graph lacks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from transformers.exporters.utils import get_leaf_tensors

from compressor.units.projections import Heads, hooked_projections


@contextmanager
def recorded_gradients(model: nn.Module) -> Iterator[None]:
    """Inside the context gradients are recorded, and all parameters require them."""
    parameters = [weight for weight in model.parameters() if weight.is_floating_point() and not weight.requires_grad]
    with ExitStack() as undo:
        for weight in parameters:
            undo.callback(weight.requires_grad_, False)
            weight.requires_grad_(True)
        undo.enter_context(torch.enable_grad())
        yield


def read_by_outputs(model: nn.Module, sites: Iterable[Heads], inputs: Mapping[str, Tensor]) -> set[str]:
    """Names of the sites outside the attention interface whose heads an output of one forward depends on.

    Args:
        model: the model, in evaluation mode.
        sites: the sites.
        inputs: keyword arguments of its forward.
    """
    read: dict[str, list[Node | None]] = {}

    def record(name: str, heads: Tensor) -> Tensor:
        read.setdefault(name, []).append(heads.grad_fn)
        return heads

    with recorded_gradients(model), hooked_projections(model, sites, record):
        outputs = get_leaf_tensors(model(**inputs)).values()
    reached = _ancestors(output.grad_fn for output in outputs)
    return {name for name, nodes in read.items() if any(node in reached for node in nodes)}


def _ancestors(nodes: Iterable[Node | None]) -> set[Node]:
    """The operations that tensors are computed by, from the last ones."""
    stack = [node for node in nodes if node is not None]
    visited = set(stack)
    while stack:
        for source, _ in stack.pop().next_functions:
            if source is not None and source not in visited:
                visited.add(source)
                stack.append(source)
    return visited
