"""The methods that choose units, by name. To add one, write its file in `compressor.selection` and add one line here.

A method is named by the path of its class, so that reading a recipe or `--help` does not load PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal

_SELECTION = "compressor.selection"


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        description: one line for the documentation.
        kind: `gate`: heads, within a budget neurons too, are learned by gradient; `search`: heads are chosen by
            evaluating subsets; `budget`: heads and neurons are chosen under a budget, without training.
        path: `module:class` of its gate, search or pruner.
        trains_model: whether the model's weights are trained too.
        epochs: passes over the training rows where the recipe sets none.
        penalised: whether a penalty closes its gates, so that neither a number of heads nor a budget is needed.
        reads_rows: whether rows decide its plan.
    """

    description: str
    kind: Literal["gate", "search", "budget"]
    path: str
    trains_model: bool = False
    epochs: float = 3.0
    penalised: bool = False
    reads_rows: bool = True

    def load(self) -> Any:
        """The class of its gate, search or pruner."""
        return resolve_name(self.path)


def _gate(
    path: str, description: str, *, trains_model: bool = True, epochs: float = 3.0, penalised: bool = False
) -> Method:
    return Method(description, "gate", f"{_SELECTION}.gates.{path}", trains_model, epochs, penalised)


def _search(path: str, description: str) -> Method:
    return Method(description, "search", f"{_SELECTION}.search.{path}")


def _pruner(path: str, description: str, *, reads_rows: bool = True) -> Method:
    return Method(description, "budget", f"{_SELECTION}.pruners.{path}", reads_rows=reads_rows)


METHODS: Mapping[str, Method] = {
    "dsp": _gate(
        "dsp:DspGate",
        "trains model and gates: differentiable subset pruning, a relaxed draw of K heads whose temperature falls until"
        " it is a hard one (Li et al. 2021)",
    ),
    "dsp-pipelined": _gate(
        "dsp:DspGate", "the same with a frozen model: only the gates learn", trains_model=False, epochs=1.0
    ),
    "ste": _gate(
        "dsp:StraightThroughGate",
        "trains model and gates: the K heads of largest weight at every step, with a straight-through gradient (Li et"
        " al. 2021, baseline)",
    ),
    "hard-concrete": _gate(
        "concrete:HardConcreteGate",
        "trains model and gates: gates in [0, 1] with a penalty on open ones (Voita et al. 2019)",
        penalised=True,
    ),
    "bin-concrete": _gate(
        "concrete:BinConcreteGate",
        "trains model and gates: gates of 0 or 1 with a penalty on open ones (Shim et al. 2021)",
        penalised=True,
    ),
    "taylor": _search(
        "taylor:TaylorSearch",
        "drops a share of the heads at a time, least important first, by the gradient of the loss or by the loss itself"
        " (Michel et al. 2019)",
    ),
    "astar": _search(
        "astar:AStarSearch",
        "drops the cheapest head and stops considering heads beyond the budget: `paper`, `literal` or `lazy` (Parnami"
        " et al. 2021)",
    ),
    "local": _search(
        "greedy:GreedySearch", "drops the cheapest of the remaining heads, one at a time (Parnami et al. 2021)"
    ),
    "global": _search(
        "greedy:GreedyByIndexSearch",
        "drops the cheapest head index in every site at once (Parnami et al. 2021)",
    ),
    "random": _search("random_subsets:RandomSearch", "the best of random subsets or orders, as a baseline"),
    "reconstruct": _pruner(
        "reconstruct.pruner:ReconstructPruner",
        "removes heads and neurons by second order, allocates them by measured loss and cost, and refits the remaining"
        " weights layer by layer; needs no labels (Kurtic et al. 2023; Frantar and Alistarh 2022)",
    ),
    "fisher": _pruner(
        "fisher:FisherPruner",
        "removes heads and neurons by the Fisher information of a mask on the model's own answers, and scales those"
        " that remain; needs no labels (Kwon et al. 2022)",
    ),
    "magnitude": _pruner(
        "unit_importance:MagnitudePruner",
        "removes the heads and neurons that are read with the smallest weights, as a baseline; the remaining weights"
        " keep their values",
        reads_rows=False,
    ),
}
"""Method name -> method."""

BUDGET_METHODS = tuple(name for name, method in METHODS.items() if method.kind == "budget")
"""Methods that remove heads and neurons under a budget, without training."""
DEFAULT_BUDGET_METHOD = "reconstruct"
HEAD_METHODS = tuple(name for name, method in METHODS.items() if method.kind != "budget")
"""Methods that select heads by training or by a search."""

SEARCH_METHODS = tuple(name for name, method in METHODS.items() if method.kind == "search")
"""Methods that evaluate subsets and can work by a budget (`max_drop`) in place of a number of heads (`keep`)."""
PENALISED_METHODS = tuple(name for name, method in METHODS.items() if method.penalised)
"""Methods that need no number of heads: the heads whose gates the penalty leaves open are kept."""
