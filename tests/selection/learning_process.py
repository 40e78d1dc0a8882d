"""One of several processes that learn together; `launch` starts this module."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from accelerate import PartialState

from compressor.training.checkpoints import digest
from tests.selection import pools, tiny


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
    state = PartialState()
    results["processes"] = {"count": state.num_processes}
    (folder / f"rank{state.process_index}.json").write_text(json.dumps(results))
    state.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
