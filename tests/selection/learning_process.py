"""One of several processes that learn together; `launch` starts this module."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from accelerate import PartialState

import compressor
from compressor.training.checkpoints import digest
from tests.run.runs import learning_recipe
from tests.selection import pools, tiny


def compress_within_budget(folder: Path) -> None:
    """A whole run with a gate under a budget; the main process delivers, and the others end after learning."""
    budget = {"keep": None, "method": "dsp", "macs": "60%", "steps": 2, "batch_size": 4}
    with contextlib.suppress(SystemExit):
        compressor.compress(learning_recipe(folder, folder / "out", **budget))


def main(folder: Path) -> None:
    """Learn with a gate that draws heads, a penalised one, and one over neurons too, and write the results."""
    results = {}
    for method in ("dsp", "hard-concrete"):
        model = tiny.classifier()
        learned = tiny.learn_plan(folder / method, tiny.selection(method=method, steps=6), model)
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
    compress_within_budget(folder)
    state = PartialState()
    results["processes"] = {"count": state.num_processes}
    (folder / f"rank{state.process_index}.json").write_text(json.dumps(results))
    state.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
