"""What a refit asks of a network: its linears, and forwards on its calibration examples.

The linear algebra of `reconstruct` works on arrays and knows nothing else of a model. `layerwise.torch_network` has the
modules of PyTorch behind this interface, and `session_network` the layers of an ONNX graph in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from compressor.progress import ProgressCallback
from compressor.selection.pruners.layerwise.gram import Gram
from compressor.selection.pruners.layerwise.refit import RefitSums


@dataclass(frozen=True, eq=False)
class LinearWeights:
    """The weights of a linear y = W x + b.

    Attributes:
        weight: W `[outputs, inputs]`, float32 or float64.
        bias: b `[outputs]`, float64; None for a linear without bias.
    """

    weight: np.ndarray
    bias: np.ndarray | None


@dataclass(frozen=True, eq=False)
class RefitSet:
    """Linears that are refitted at once: they are called in the same layer, and do not depend on each other.

    Attributes:
        linears: their paths.
        weighted_by: path of the linear whose token weights their tokens have; None: all tokens have equal weights.
        columns: indices of the inputs that are summed up; None: all.
    """

    linears: tuple[str, ...]
    weighted_by: str | None
    columns: np.ndarray | None = None


SumsOfLinears = Callable[[], Mapping[str, RefitSums]]
"""Runs the calibration examples; path of a linear -> sums over its inputs and its targets."""


Divergence = Callable[[str, LinearWeights], float]
"""The mean divergence of the answers with other weights of the linear at a path."""


class Network(Protocol):
    """A network with its calibration examples, and with other examples that losses are measured on.

    Tokens that are padding count nowhere. Paths are those of the linears that groups end in, and of their feeders.
    """

    @property
    def rows(self) -> int:
        """Number of calibration examples."""
        ...

    @property
    def calls_once(self) -> bool:
        """Whether a forward calls the linear of each group once; known after `weigh`."""
        ...

    def linear(self, path: str) -> LinearWeights:
        """A copy of the present weights of a linear."""
        ...

    def set_linear(self, path: str, weights: LinearWeights) -> None:
        """Give a linear other weights, and another bias where it has one."""
        ...

    def count_tokens(self, linears: Sequence[str]) -> dict[str, int]:
        """About the number of tokens that each linear reads on the calibration examples."""
        ...

    def weigh(self, linears: Sequence[str], on_progress: ProgressCallback) -> Mapping[str, np.ndarray]:
        """Weigh tokens and errors of outputs by how much the answers of the network depend on them.

        Later sums have the weights of the tokens.

        Args:
            linears: paths of the linears that groups end in.
            on_progress: called with (batches, all batches).

        Returns:
            Path of each linear -> weights of errors of its outputs `[outputs, outputs]`, whose mean eigenvalue is one;
            zeros where the network knows none.
        """
        ...

    def grams(self, linears: Sequence[str], on_progress: ProgressCallback) -> dict[str, Gram]:
        """Path of each linear -> Gram matrix of its inputs.

        Raises:
            InputError: an activation is not finite.
        """
        ...

    def divergence(self) -> Divergence:
        """Measures losses of the whole network on the held-out examples, whose activations it holds.

        The network must not change while the returned function is in use.
        """
        ...

    def feeders(self, linear: str) -> tuple[str, ...]:
        """Paths of the linears that compute what the units of a linear are made of; possibly none."""
        ...

    def sums_in_order(self, sets: Sequence[RefitSet], on_progress: ProgressCallback) -> Iterator[SumsOfLinears]:
        """For each set of linears, the sums for its refit in the network as it is pruned so far.

        With y the output of a linear and R the residual stream that it is added to, and with y' and R' those of the
        network as it is when the first set is requested, which has its original weights, the target of y is
        y' + R' - R; without such a sum it is y'. Each linear can therefore repair what all linears before it lost.

        Args:
            sets: the sets, in the order in which the network calls them. The linears of one set get their weights
                before the next set is requested; the sums of a set need not be computed.
            on_progress: called with (sets, all sets).

        Raises:
            InputError: an activation is not finite.
        """
        ...
