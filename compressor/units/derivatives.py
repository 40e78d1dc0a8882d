"""Derivatives of chunks of a tensor by the outputs of the operations that computed it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

_TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2
"""Largest difference, relative to the sum of magnitudes, at which two sums count as equal, and in half precision."""


def slopes(chunk: Tensor, nodes: Sequence[Node]) -> list[Tensor | None]:
    """The derivatives of the sum of a chunk by the outputs of nodes; None: the chunk does not depend on one."""
    if not nodes:
        return []
    edges = [GradientEdge(node, 0) for node in nodes]
    return list(torch.autograd.grad(chunk.sum(), edges, retain_graph=True, allow_unused=True))


def is_sum(chunk: Tensor, probabilities: Sequence[Tensor], derivatives: Sequence[Tensor | None]) -> bool:
    """Whether a chunk is linear in probabilities, of which it has these derivatives."""
    pairs = zip(probabilities, derivatives, strict=True)
    terms = [part.double() * slope.double() for part, slope in pairs if slope is not None]
    magnitude = sum(float(term.abs().sum()) for term in terms)
    difference = float(chunk.detach().double().sum()) - sum(float(term.sum()) for term in terms)
    tolerance = HALF_TOLERANCE if chunk.element_size() < 4 else _TOLERANCE
    return magnitude > 0 and abs(difference) <= tolerance * magnitude


def holds_rows(x: Tensor, axis: int, softmaxes: Sequence[Node]) -> bool:
    """Whether the first entry of an axis depends only on the first probabilities, which belong to the first row.

    The first axis of probabilities holds rows, or rows times heads or windows.
    """
    for slope in slopes(x.select(axis, 0), softmaxes):
        if slope is not None and bool((slope[max(1, len(slope) // x.shape[axis]) :] != 0).any()):
            return False
    return True


def are_disjoint(derivatives: Sequence[Sequence[Tensor | None]]) -> bool:
    """Whether no entry of a tensor has a derivative in two chunks."""
    for of_tensor in zip(*derivatives, strict=True):
        used = [(slope != 0).int() for slope in of_tensor if slope is not None]
        if used and int(torch.stack(used).sum(0).max()) > 1:
            return False
    return True


def count_groups(derivatives: Sequence[Sequence[Tensor | None]]) -> int:
    """Number of value heads: consecutive chunks that depend on the same outputs of a value projection share one."""
    heads = len(derivatives)
    first = [
        next(earlier for earlier in range(head + 1) if earlier == head or _overlap(derivatives[earlier], of_head))
        for head, of_head in enumerate(derivatives)
    ]
    groups = len(set(first))
    shared = heads // groups
    return groups if first == [head // shared * shared for head in range(heads)] else heads


def _overlap(left: Iterable[Tensor | None], right: Iterable[Tensor | None]) -> bool:
    pairs = zip(left, right, strict=True)
    return any(bool(((a != 0) & (b != 0)).any()) for a, b in pairs if a is not None and b is not None)
