"""What a runtime gives back: an engine that runs, and the facts about the graph that it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

Precision = Literal["fp32", "fp16"]
Provider = Literal["cpu", "cuda"]
Feeds = Mapping[str, np.ndarray]
"""One batch: array by name of graph input."""

TOLERANCE: Mapping[Precision, float] = {"fp32": 1e-4, "fp16": 2e-2}
"""Largest relative error at which an engine still computes the function of its graph."""


class Engine(Protocol):
    """One graph, built and loaded.

    Attributes:
        path: the file that the runtime loads.
        inputs, outputs: names of the graph's inputs and outputs, in order.
        precision: numbers that it computes in.
        attentions: attentions that the graph has; a layer whose attention was removed needs none.
        fused: how many of them the runtime executes as one operator each.
        kernels: how many operators of each type the runtime executes.
        optimization: what was done to the graph for this runtime, in one line.
        session: runtime, its version, device and options: all that is needed to build the like again.
    """

    @property
    def path(self) -> Path: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def attentions(self) -> int: ...
    @property
    def fused(self) -> int: ...
    @property
    def kernels(self) -> Mapping[str, int]: ...
    @property
    def optimization(self) -> str: ...
    @property
    def session(self) -> Mapping[str, Any]: ...

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name. Inputs that the graph does not have are left out."""
        ...

    def memory(self, feeds: Feeds) -> int | None:
        """By how many bytes loading it and running `feeds` grows a fresh process at its peak; None: cannot be told."""
        ...
