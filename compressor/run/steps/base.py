"""What the steps of a run share: their state, their context, and the functions of their modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from compressor.config.steps import Step
from compressor.engines.build import ExportedGraph, Variant
from compressor.engines.choose import ChosenEngine
from compressor.engines.score import EvaluationScorer
from compressor.model_folder import ModelFolder
from compressor.model_folder.access import ModelAccess
from compressor.run.plan_source import PlanFiles
from compressor.run.run_context import RunContext, RunInputs
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.store import Json, Store
from graph_passes import Refusal

if TYPE_CHECKING:
    from compressor.generation.deliver import CachedGraphs

PLAN, DELIVERED = "plan", "delivered"
"""Names of results in the store of a step: the plan with its weights, and the engine that is delivered."""
LABEL = Json[str](str)
"""The label of an engine in a store."""
STATISTICS = "statistics"
"""Folder of statistics beside those of the steps."""


@dataclass(frozen=True)
class Rungs:
    """Slower plans that keep the metric too, beside that of a state.

    Attributes:
        name: what the plan of the state is called.
        milder: name of each slower plan, the slowest first -> gives its state, whose weights the model then has.
        deadline: when the run has to end, by `time.perf_counter`.
    """

    name: str
    milder: Mapping[str, Callable[[], State]]
    deadline: float = math.inf


@dataclass(frozen=True)
class State:
    """What the steps so far came to; the model has the weights of the plan.

    Attributes:
        selected: the plan.
        engine: the engine that units were removed for; None: for none.
        scorer: scored the engines that it was chosen from; None: no engine was chosen.
        rungs: slower plans that keep the metric too; None: none are known.
    """

    selected: SelectedPlan
    engine: ChosenEngine | None = None
    scorer: EvaluationScorer | None = None
    rungs: Rungs | None = None


@dataclass(frozen=True)
class Graphs:
    """The graph of the whole model, which the main process alone exports and builds.

    Attributes:
        reference: the exported graph.
        dense: its engine.
        refused: groups that cannot be removed from the graph.
        cached: its graphs with key/value caches; None: the model does not generate, or is exported without them.
    """

    reference: ExportedGraph
    dense: Variant
    refused: Sequence[Refusal]
    cached: CachedGraphs | None = None


def _accept(*_: object) -> None:
    """Raise for nothing."""


@dataclass(frozen=True)
class StepFunctions:
    """What carries a step out. The three checks run for the whole list before anything learns.

    Attributes:
        run: carries the step out, or takes its result from the store of an interrupted run. The model has the weights
            of the returned state afterwards. Its version (`versioned`) is part of the key of the step.
        check_options: raises for options that do not exist or contradict each other; no model is loaded yet.
        check: raises for what the model, the rows or an earlier step rule out; no graph is exported yet.
        rehearse: raises for what the graph of the whole model rules out.
    """

    run: Callable[[Any, State, StepContext, Store], State]
    check_options: Callable[[Any], None] = _accept
    check: Callable[[Any, RunInputs, Sequence[Step]], None] = _accept
    rehearse: Callable[[Any, StepContext, Sequence[Step]], None] = _accept


def functions_of(step: Step) -> StepFunctions:
    """What carries a step out: `FUNCTIONS` of the module of its name."""
    functions: StepFunctions = import_module(f"compressor.run.steps.{step.name}").FUNCTIONS
    return functions


@dataclass(frozen=True)
class StepContext:
    """What every step of a run reads.

    Attributes:
        run: the settings, the model, the rows and the log.
        whole: the graph of the whole model; None in worker processes.
    """

    run: RunContext
    whole: Graphs | None = None

    @property
    def graphs(self) -> Graphs:
        """The graph of the whole model, in the main process."""
        assert self.whole is not None
        return self.whole


def signed(learned: SelectedPlan, folder: ModelFolder) -> SelectedPlan:
    """The plan that was learned, signed for the weights of the model."""
    folder.network.to("cpu")  # type: ignore[arg-type]  # a trainer with a GPU leaves the model there
    signature = folder.access.fingerprint() if learned.trained else folder.fingerprint
    return replace(learned, plan=learned.plan.model_copy(update={"model": signature}))


def stored_state(store: Store, model: ModelAccess) -> State:
    """The state that a finished step left in its store; the model gets its weights."""
    selected = store.load(PLAN, PlanFiles(model))
    assert selected is not None
    return State(replace(selected, engine=store.load(DELIVERED, LABEL) or selected.engine))
