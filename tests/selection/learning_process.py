"""Learning in one of several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import PartialState

from compressor.training.checkpoints import digest
from tests.selection import pools, tiny


def learn_together(folder: Path) -> dict[str, Any]:
    """Results of a gate that draws heads, a penalised one, and one over neurons too."""
    results: dict[str, Any] = {}
    for method in ("dsp", "hard-concrete"):
        model = tiny.classifier()
        learned = tiny.learn_plan(folder / method, tiny.selection(method=method, training_steps=6), model)
        results[method] = {
            "kept": [site.kept for site in learned.plan.sites],
            "weights": digest(model),
            "curves": [point.model_dump() for point in learned.curves],
        }
    network = pools.classifier()
    within = pools.learn(folder / "pool", model=network)
    results["pool"] = {
        "kept": [group.kept for group in within.plan.groups],
        "weights": digest(network),
        "curves": [point.model_dump() for point in within.curves],
    }
    results["processes"] = {"count": PartialState().num_processes}
    return results
