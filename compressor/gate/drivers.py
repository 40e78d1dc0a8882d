"""What is timed: a model on an inference server, or a graph loaded here. Both answer the same calls."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from compressor.targets.base import Feeds, Precision
from compressor.targets.tensors import Tensor


class Driver(Protocol):
    """Something that answers.

    Attributes:
        name: of the model, as it is told.
        host: where it runs: the machine's or the server's own words.
        precision: of its answers, as far as is known: a server's may be in half.
        inputs: what it takes.
    """

    name: str
    host: str
    precision: Precision
    inputs: tuple[Tensor, ...]

    def draw(self, batch: int, seq: int, seed: int) -> Feeds:
        """A random batch; `seq` is the size of every free axis but the first."""
        ...

    def prepare(self, feeds: Feeds) -> Any:
        """A batch in the form that `call` takes; outside what is timed."""
        ...

    def call(self, prepared: Any) -> Any:
        """One call."""
        ...

    def answers(self, prepared: Any) -> dict[str, np.ndarray]:
        """One call's outputs, by name."""
        ...

    def rest(self) -> None:
        """Wait until what ran before is quiet."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...
