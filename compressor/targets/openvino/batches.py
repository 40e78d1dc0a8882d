"""How a batch runs at a fixed shape: which shape holds it, how its inputs are padded, and how its outputs are cut.

This file is copied beside a served model, and needs NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Axes = Mapping[str, tuple[str, ...]]
"""Name of a tensor -> names of its axes, such as `batch` and `sequence`; the name of a fixed axis is its size."""
Feeds = Mapping[str, np.ndarray]
"""Input name -> array."""
Shape = tuple[int, int]
"""Batch size and length."""
_LEAST_FILL = 0.8
"""Least share of a fixed shape that a batch fills to run there: a fixed shape of 128 tokens is 1.1 to 1.2 times as
fast as free axes."""


def fitting_shape(shapes: Iterable[Shape], axes: Axes, feeds: Feeds, *, pads: bool) -> Shape | None:
    """The smallest shape that holds a batch and is mostly filled by it; None if the batch runs with free axes.

    Args:
        pads: whether a batch may be padded, see `can_pad`.
    """
    if not _is_consistent(axes, feeds):
        return None
    batch, seq = sizes_of(axes, feeds)
    fitting = [
        (rows, length)
        for rows, length in shapes
        if (rows, length) == (batch, seq)
        or (pads and rows >= batch and length >= seq and batch * seq >= _LEAST_FILL * (rows * length))
    ]
    return min(fitting, key=lambda shape: (shape[0] * shape[1], shape), default=None)


def _is_consistent(axes: Axes, feeds: Feeds) -> bool:
    """Whether the inputs are arrays of the graph's ranks, and axes of one name have one size."""
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
        shape: the shape to reach.
    """
    sizes = dict(zip(("batch", "sequence"), shape, strict=True))
    padded = {}
    for tensor, names in axes.items():
        array = feeds[tensor]
        missing = [(0, sizes.get(name, size) - size) for name, size in zip(names, array.shape, strict=True)]
        padded[tensor] = np.pad(array, missing) if any(end for _, end in missing) else array
    return padded


def unpadded(axes: Axes, sizes: Shape) -> list[tuple[slice, ...]]:
    """The part of each output of a padded batch that is no padding, in the order of the outputs."""
    kept = dict(zip(("batch", "sequence"), sizes, strict=True))
    return [tuple(slice(kept.get(name)) for name in names) for names in axes.values()]


def at_shape(model: Any, inputs: Iterable[str], axes: Axes, shape: Shape) -> Any:
    """A copy of an `openvino.Model` with a fixed shape; `inputs` are in the graph's order."""
    sizes = dict(zip(("batch", "sequence"), shape, strict=True))
    fixed = model.clone()
    fixed.reshape(dict(enumerate([sizes.get(name) or int(name) for name in axes[tensor]] for tensor in inputs)))
    return fixed


class EngineRequest:
    """A request of OpenVINO, which runs one batch at a time.

    At fixed shapes inputs are copied into the tensors of the request. Passing new tensors at each call (`share_inputs`
    of OpenVINO) takes longer than the copy, because the compiled graph is prepared for them each time. Where axes are
    free, new tensors are passed: OpenVINO checks their shapes, but not those of the request's tensors.

    Args:
        request: an `openvino.InferRequest`.
    """

    def __init__(self, request: Any) -> None:
        self._request = request
        self._is_fixed = not any(port.partial_shape.is_dynamic for port in request.model_inputs)
        self._inputs = [tensor.data for tensor in request.input_tensors] if self._is_fixed else []

    def run(
        self, arrays: Sequence[np.ndarray], parts: Sequence[tuple[slice, ...]] | None = None
    ) -> tuple[np.ndarray, ...]:
        """The outputs in the graph's order, as copies.

        Args:
            arrays: the inputs in the graph's order.
            parts: the part of each output that is returned, see `unpadded`; None: all.

        Raises:
            ValueError: at fixed shapes, an input has another shape; or the graph did not compute its outputs.
        """
        if self._is_fixed:
            for tensor, array in zip(self._inputs, arrays, strict=True):
                if array.shape != tensor.shape:
                    raise ValueError(f"an input has the shape {array.shape}, and the graph expects {tensor.shape}")
                tensor[...] = array
            outputs: tuple[np.ndarray, ...] = self._request.infer().to_tuple()
        else:
            self._mark_outputs()
            outputs = self._request.infer(list(arrays), share_inputs=True).to_tuple()
        if parts is not None:
            outputs = tuple(output[part] for output, part in zip(outputs, parts, strict=True))
        if all(array.size for array in arrays):
            for output in outputs:
                _require_computed(output)
        return outputs

    def _mark_outputs(self) -> None:
        """Write NaN into the last element of each output.

        Where a graph cannot compute a batch, e.g. one that has more tokens than the model has positions, OpenVINO 2026
        raises nothing and returns the outputs of the previous batch.
        """
        for tensor in self._request.output_tensors:
            if tensor.size and tensor.data.dtype.kind == "f":
                tensor.data.flat[-1] = np.nan


def _require_computed(output: np.ndarray) -> None:
    """Raise ValueError if an output is empty, was not written since `_mark_outputs`, or read rows that a table lacks.

    The last element of a text is that of its last token, whose position is the last one. It is no padding in a text of
    a decoder, which is padded at its start.
    """
    last = output
    while last.size and last.ndim > 1:
        last = last[:, -1]
    if not output.size or (output.dtype.kind == "f" and np.isnan(last).any()):
        text = "an output is empty or NaN: a text exceeds the positions of the model, or an id its vocabulary"
        raise ValueError(text)


@dataclass(frozen=True)
class CompiledGraph:
    """A graph compiled for free axes and for fixed shapes; each batch runs at the smallest shape that holds it.

    Attributes:
        inputs, outputs: names of its inputs and outputs, in the graph's order.
        facts: the facts that are stored in it.
        free: returns the request that runs it with free axes, for which it may compile the graph.
        fixed: runs it at fixed shapes.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    facts: Mapping[str, Any]
    free: Callable[[], EngineRequest]
    fixed: Mapping[Shape, EngineRequest] = field(default_factory=dict)

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name; feeds that the graph has no input for are ignored.

        Raises:
            KeyError: an input is missing.
            ValueError: see `EngineRequest.run`.
        """
        axes = self.facts.get("input_axes", {})
        shape = fitting_shape(self.fixed, axes, feeds, pads=self.facts.get("pads", False)) if self.fixed else None
        if shape is None:
            request, parts = self.free(), None
        else:
            request, parts = self.fixed[shape], unpadded(self.facts["output_axes"], sizes_of(axes, feeds))
            feeds = pad(axes, feeds, shape)
        outputs = request.run([feeds[name] for name in self.inputs], parts)
        return dict(zip(self.outputs, outputs, strict=True))
