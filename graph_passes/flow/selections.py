"""Sizes of what `NonZero` selects, which depend on the data: placeholders that differ between both assignments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.node_inference import Shape
from graph_passes.flow.sizes import is_selection

_CLIPS = ("Slice", "Min", "TopK")
"""Operators that give one size for many: `[:4]` has four elements of ten, and three of three."""


def selected_shape(
    source: ir.Value | None, selected: int, shapes: Mapping[ir.Value, Shape], constants: Mapping[ir.Value, np.ndarray]
) -> Shape | None:
    """Shape of the positions `[axis, n]` of a tensor's nonzero elements; None: the shape of the tensor is unknown.

    Args:
        source: the tensor.
        selected: number of its nonzero elements where its content is unknown.
        shapes: known shapes of tensors.
        constants: known contents of small tensors.
    """
    if source is None or source not in shapes:
        return None
    content = constants.get(source)
    return len(shapes[source]), selected if content is None else int(np.count_nonzero(content))


def clips_selection(
    node: ir.Node, shapes: Sequence[Mapping[ir.Value, Shape]], constants: Sequence[Mapping[ir.Value, np.ndarray]]
) -> bool:
    """Whether a node gives one size for those of a selection, which passes for fixed: fewer elements have another one.

    Args:
        node: the node.
        shapes: shapes of tensors under each assignment.
        constants: content of small tensors under each assignment.
    """
    if node.op_type not in _CLIPS:
        return False
    before = [pair for value in node.inputs for pair in _numbers(value, shapes, constants)]
    after = _numbers(node.outputs[0], shapes, constants)
    return any(is_selection(*pair) for pair in before) and any(first == second for first, second in after)


def _numbers(
    value: ir.Value | None,
    shapes: Sequence[Mapping[ir.Value, Shape]],
    constants: Sequence[Mapping[ir.Value, np.ndarray]],
) -> list[tuple[int, int]]:
    """The sizes of a tensor, and its whole numbers where its content is known, under both assignments."""
    if value is None:
        return []
    sizes = [known.get(value, ()) for known in shapes]
    contents = [array for known in constants if (array := known.get(value)) is not None and array.dtype.kind == "i"]
    numbers = [array.reshape(-1).tolist() for array in contents] if len(contents) == len(constants) else [[], []]
    return [*zip(*sizes, strict=False), *zip(*numbers, strict=False)]
