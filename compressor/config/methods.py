"""The methods that choose heads, by name. To add one: write its file in `compressor.selection`, add one line here.

A method is named by the path of its class, so that reading a recipe or `--help` does not load PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

_SELECTION = "compressor.selection"


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        kind: `gate`: learned by gradient together with the weights; `search`: chosen by evaluating subsets.
        path: `module:class` of its gate or search.
        trains_model: the model's weights learn too.
        epochs: passes over the training rows where the recipe does not say.
        penalised: a penalty closes its gates, so it works without a number of heads to keep.
    """

    kind: Literal["gate", "search"]
    path: str
    trains_model: bool = False
    epochs: float = 3.0
    penalised: bool = False

    def load(self) -> Any:
        """The class of its gate or search."""
        module, _, name = self.path.partition(":")
        return getattr(import_module(module), name)


def _gate(path: str, *, trains_model: bool = True, epochs: float = 3.0, penalised: bool = False) -> Method:
    return Method("gate", f"{_SELECTION}.gates.{path}", trains_model, epochs, penalised)


def _search(path: str) -> Method:
    return Method("search", f"{_SELECTION}.search.{path}")


METHODS: Mapping[str, Method] = {
    "dsp": _gate("dsp:DspGate"),
    "dsp-pipelined": _gate("dsp:DspGate", trains_model=False, epochs=1.0),
    "ste": _gate("ste:StraightThroughGate"),
    "hard-concrete": _gate("hard_concrete:HardConcreteGate", penalised=True),
    "bin-concrete": _gate("bin_concrete:BinConcreteGate", penalised=True),
    "taylor": _search("taylor:TaylorSearch"),
    "astar": _search("astar:AStarSearch"),
    "local": _search("greedy:LocalSearch"),
    "global": _search("greedy_by_index:GlobalSearch"),
    "random": _search("random_subsets:RandomSearch"),
}
"""Method name -> method."""

SEARCH_METHODS = tuple(name for name, method in METHODS.items() if method.kind == "search")
"""Methods that evaluate subsets and can work by a budget (`max_drop`) in place of a number of heads (`keep`)."""
PENALISED_METHODS = tuple(name for name, method in METHODS.items() if method.penalised)
"""Methods that need no number of heads: as many stay as their penalty leaves open."""
