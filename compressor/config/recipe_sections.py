"""The sections of a recipe together, and which stages of a run follow from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import SerializeAsAny

from compressor.config.graph_file import graph_of
from compressor.config.methods import BUDGET_METHODS, DEFAULT_BUDGET_METHOD, METHODS
from compressor.config.recipe_fields import FIELDS, SECTION_OF, SECTIONS, Sections
from compressor.config.steps import Step


class RecipeSections(Sections):
    """The sections of a recipe, and what a run does by them; `Recipe` checks that they agree.

    Attributes:
        steps: the steps of the run, written out; None: those that the flags stand for, see `step_list.steps_of`.
    """

    steps: tuple[SerializeAsAny[Step], ...] | None = None

    @property
    def plan_file(self) -> Path | None:
        """The plan to follow: the one configured; else, unless blocks are dropped from it, that of the model folder."""
        if self.selection.plan is not None or self.blocks.drops_any:
            return self.selection.plan
        return self.stored_plan

    @property
    def stored_plan(self) -> Path | None:
        """The plan in the model folder, to which its weights belong; None: there is none.

        A graph beside a plan is what is left under it.
        """
        stored = self.source.model / "plan.json"
        return stored if stored.exists() and self.graph is None else None

    @property
    def graph(self) -> Path | None:
        """The ONNX graph that is compressed; None: it is a model folder with weights of PyTorch."""
        return graph_of(self.source.model)

    @property
    def selects_heads(self) -> bool:
        """Whether heads are selected before any other unit is removed.

        Where blocks are dropped, the fastest engine is chosen, or a teacher is named, they are only if a number of
        heads, or another method than the default, is set. A run that quantizes and keeps 100% of the heads learns
        nothing.
        """
        selection = self.selection
        if self.plan_file is not None or selection.method in BUDGET_METHODS or self.learns_units:
            return False
        if self.rows.data is None:  # which a number of heads requires
            return selection.keep is not None
        if self.engine.compares and selection.keep == "100%":
            return False
        # A budget without a method has one of its own, so that this one was set.
        taught = self.distillation.distill and self.distillation.teacher is not None
        is_set = self.budget.is_set or selection.keep is not None or selection.method != FIELDS["method"].default
        return is_set or not (self.blocks.requested or self.engine.compares or taught)

    @property
    def learns_units(self) -> bool:
        """Whether a gate learns which units meet the budget, of the types that `prune_units` allows.

        This needs costs that are sums over units, which times are not, and no number of heads.
        """
        budget, selection = self.budget, self.selection
        if self.rows.data is None or METHODS[selection.method].kind != "gate":
            return False
        return budget.is_set and not budget.is_timed and selection.keep is None

    @property
    def learns(self) -> bool:
        """Whether a plan is learned from rows."""
        return self.prunes or (self.plan_file is None and (self.selects_heads or self.blocks.drops_any))

    @property
    def prunes(self) -> bool:
        """Whether units are removed under a budget, or as many as the metric allows."""
        return self.budget.is_set or (self.plan_file is None and self.selection.method in BUDGET_METHODS)

    @property
    def pruner(self) -> str:
        """Name of the method that removes units under a budget."""
        method = self.selection.method
        return method if method in BUDGET_METHODS else DEFAULT_BUDGET_METHOD

    @property
    def fields_set(self) -> frozenset[str]:
        """Names of the fields that were set, even to their defaults."""
        return frozenset().union(*(getattr(self, section).model_fields_set for section in SECTIONS))

    def value(self, name: str) -> Any:
        """The value of a field, by its name alone."""
        return getattr(getattr(self, SECTION_OF[name]), name)

    def flat(self) -> dict[str, Any]:
        """Every field as JSON, by name, without sections: what reports store."""
        fields = {
            name: value
            for section in SECTIONS
            for name, value in getattr(self, section).model_dump(mode="json").items()
        }
        if self.steps is not None:
            fields["steps"] = [{step.name: step.model_dump(mode="json", exclude_unset=True)} for step in self.steps]
        return fields
