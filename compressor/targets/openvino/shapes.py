"""Fixed shapes: an engine compiled for some sizes of its inputs pads shorter ones, and cuts the outputs.

OpenVINO plans the memory and the kernels of a graph whose axes are numbers ahead of time, and is faster with it. Rows
are padded at their end with zeros, which is correct for a graph that has an attention mask and only looks up the
embeddings of its tokens: padded positions are masked, and their outputs are cut off. Any other graph, such as one that
searches for the token that pads, runs at a fixed shape only if its inputs have that size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from compressor.targets.base import Feeds, Shape

Axes = Mapping[str, tuple[str, ...]]
"""Name of a tensor -> names of its axes, `batch` and `sequence` among them; fixed axes have their size as name."""


def fitting_shape(shapes: Iterable[Shape], axes: Axes, feeds: Feeds, *, pads: bool) -> Shape | None:
    """The smallest shape that holds a batch; None if there is none, or the batch is not one that the graph takes.

    Args:
        shapes: the fixed shapes.
        axes: axes of the inputs.
        feeds: one batch of inputs.
        pads: whether a batch may be padded, see `can_pad`.
    """
    if not _is_consistent(axes, feeds):
        return None
    batch, seq = sizes_of(axes, feeds)
    fitting = [
        (rows, length)
        for rows, length in shapes
        if (rows, length) == (batch, seq) or (pads and rows >= batch and length >= seq)
    ]
    return min(fitting, key=lambda shape: (shape[0] * shape[1], shape), default=None)


def can_pad(model: ir.Model) -> bool:
    """Whether rows of a graph may be padded with zeros: it has a mask, and reads its tokens only to look them up."""
    inputs = {str(value.name): value for value in model.graph.inputs if not value.is_initializer()}
    is_masked = any(name.endswith("attention_mask") for name in inputs)
    return is_masked and all(_is_looked_up(value) for name, value in inputs.items() if name.endswith("input_ids"))


def _is_looked_up(value: ir.Value) -> bool:
    """Whether a tensor is read only as the indices of `Gather`, or for its shape."""
    return all(
        (reader.op_type == "Gather" and position == 1)
        or reader.op_type == "Shape"
        or (reader.op_type in ("Cast", "Identity", "Reshape") and position == 0 and _is_looked_up(reader.outputs[0]))
        for reader, position in value.uses()
    )


def _is_consistent(axes: Axes, feeds: Feeds) -> bool:
    """Whether the feeds are arrays of the graph's ranks, and agree on the sizes of their axes."""
    sizes: dict[str, int] = {}
    for tensor, names in axes.items():
        array = feeds.get(tensor)
        if not isinstance(array, np.ndarray) or array.ndim != len(names):
            return False
        for name, size in zip(names, array.shape, strict=True):
            if sizes.setdefault(name, size) != size or (name.isdecimal() and int(name) != size):
                return False
    return True


def sizes_of(axes: Axes, feeds: Feeds) -> Shape:
    """Batch size and length of a batch of inputs."""
    sizes = {
        name: size for tensor, names in axes.items() for name, size in zip(names, feeds[tensor].shape, strict=True)
    }
    return sizes.get("batch", 1), sizes.get("sequence", 1)


def pad(axes: Axes, feeds: Feeds, shape: Shape) -> dict[str, np.ndarray]:
    """The inputs, with zeros added at the end of their batch and sequence axes.

    Args:
        axes: axes of the inputs.
        feeds: one batch of inputs.
        shape: the shape to reach.
    """
    sizes = dict(zip(("batch", "sequence"), shape, strict=True))
    padded = {}
    for tensor, names in axes.items():
        array = feeds[tensor]
        missing = [(0, sizes.get(name, size) - size) for name, size in zip(names, array.shape, strict=True)]
        padded[tensor] = np.pad(array, missing) if any(end for _, end in missing) else array
    return padded


def cut(axes: Axes, outputs: Mapping[str, np.ndarray], sizes: Shape) -> dict[str, np.ndarray]:
    """The outputs without the padding.

    Args:
        axes: axes of the outputs.
        outputs: outputs of a padded batch.
        sizes: batch size and length of the batch.
    """
    kept = dict(zip(("batch", "sequence"), sizes, strict=True))
    return {tensor: array[tuple(slice(kept.get(name)) for name in axes[tensor])] for tensor, array in outputs.items()}


def axis_names(value: ir.Value) -> tuple[str, ...]:
    """Names of the axes of an input or output of a graph."""
    return tuple(str(size) for size in value.shape or ())


def unfixable(inputs: Axes, outputs: Axes) -> str | None:
    """Why a graph cannot be compiled for fixed shapes, in a few words; None if it can."""
    known = {"batch", "sequence"}
    for tensor, names in (*inputs.items(), *outputs.items()):
        free = [name for name in names if not name.isdecimal() and name not in known]
        if free:
            return f"the axis {free[0]} of {tensor} is neither the batch nor the length of the rows"
    return None
