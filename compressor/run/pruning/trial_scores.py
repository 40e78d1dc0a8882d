"""Scores of the plans that `--max-drop` tries, kept until a run has its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from compressor.run.pruning.metric_trials import ResampledScore
from compressor.run.pruning.stored_content import StoredContent
from graph_passes.files import write_text


class _PlanScore(BaseModel):
    """The fields of `ResampledScore`, and the number of units that the plan keeps of each group."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    counts: Mapping[str, int]
    metric: float
    draws: tuple[float, ...]
    divergence: float


class _Stored(StoredContent):
    """The content of the file."""

    key: str
    plans: tuple[_PlanScore, ...] = ()


@dataclass(frozen=True)
class TrialScores:
    """A file with the scores of plans, from which an interrupted bisection goes on.

    Attributes:
        path: file in the folder of what the run learns, which another recipe, model or other rows empty.
        key: what the weights of a plan depend on besides; a file with another key is not read.
    """

    path: Path
    key: str

    def find(self, counts: Mapping[str, int]) -> ResampledScore | None:
        """The score of a plan, if it is kept."""
        for plan in self._plans():
            if plan.counts == counts:
                return ResampledScore(plan.metric, np.array(plan.draws), plan.divergence)
        return None

    def keep(self, counts: Mapping[str, int], score: ResampledScore) -> None:
        """Add the score of a plan."""
        fields = {"metric": score.metric, "draws": tuple(score.draws.tolist()), "divergence": score.divergence}
        plans = (*self._plans(), _PlanScore(counts=dict(counts), **fields))
        write_text(self.path, _Stored(key=self.key, plans=plans).model_dump_json())

    def _plans(self) -> tuple[_PlanScore, ...]:
        """The plans in the file, with their scores."""
        stored = _Stored.read(self.path, self.key)
        return () if stored is None else stored.plans
