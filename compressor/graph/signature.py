"""The inputs and outputs of a graph: their types and axes, models that have them, and what runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class OutputSpec:
    """An output of a graph.

    Attributes:
        dtype: its element type.
        shape: the size of each axis, rows first; None: any size.
    """

    dtype: np.dtype
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class InputSpec(OutputSpec):
    """An input of a graph, with the attributes of `OutputSpec`.

    Attributes:
        ids: number of ids in the table of embeddings that it is looked up in; None: it is no input of ids.
    """

    ids: int | None = None


@runtime_checkable
class HasSignature(Protocol):
    """A model with the inputs and outputs of a graph.

    Attributes:
        input_specs: type and shape of each input by name.
        output_specs: type and shape of each output by name.
    """

    input_specs: Mapping[str, InputSpec]
    output_specs: Mapping[str, OutputSpec]


@runtime_checkable
class RunsArrays(Protocol):
    """A model that runs on arrays, without PyTorch."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """The outputs by name, `[batch, ...]` each, of the inputs by name."""


@dataclass(frozen=True)
class GeneratingForward:
    """A function that runs a model or an engine on arrays, and may have key/value caches to generate with.

    Attributes:
        run: what a call runs.
        generator: takes the model of the folder, and returns the one of transformers whose `generate`, with a cache, is
            that of the model or the engine; None: it has no cache.
    """

    run: Callable[[Any], Any]
    generator: Callable[[Any], Any]

    def __call__(self, batch: Mapping[str, np.ndarray]) -> Any:
        return self.run(batch)


def generator_of(forward: Callable[[Any], Any], model: Any) -> Any:
    """The model that generates with a cache and computes what `forward` does; see `GeneratingForward`."""
    return getattr(forward, "generator", lambda _: None)(model)
