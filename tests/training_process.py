"""One of several processes that train a language model and its gates together; `launch` starts this module."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from compressor.selection.learn import learn
from compressor.tasks import Data
from compressor.training.checkpoints import digest
from compressor.training.fit import fit
from compressor.units import find_sites
from tests import language
from tests.learning import Recipe


def learn_gates(path: Path, rows: Data, stop: int | None = None) -> dict[str, Any]:
    """The result of learning gates and model together, with dropout; the run ends early after the step `stop`."""

    def on_progress(done: int, total: int) -> None:
        if done == stop:
            raise language.EndOfPowerError

    untrained = language.folder()
    sites = find_sites(untrained.model, {"input_ids": torch.ones(2, 4, dtype=torch.int64)})
    recipe = Recipe(options={"optimizer": "lamb", "evaluations": 4}, batch_size=2)
    learned = learn(untrained.model, sites, rows, recipe, path, on_progress)
    return {
        "kept": [site.kept for site in learned.plan.sites],
        "weights": digest(untrained.model),
        "curves": [point.model_dump() for point in learned.curves],
    }


def main(path: Path) -> None:
    """Train in one of several processes, each of which reads its own streams."""
    untrained = language.folder(**language.UNDROPPED)
    state = PartialState(cpu=True)
    with state.main_process_first():
        rows = language.data(path, untrained)
    log = fit(untrained.model, rows, language.schedule(batch_size=2), {}, path / "run", lambda done, total: None)
    whole = learn_gates(path / "whole", rows)
    with contextlib.suppress(language.EndOfPowerError):
        learn_gates(path / "halved", rows, stop=7)
    results = {
        "weights": digest(untrained.model),
        "norm": float(sum(weight.double().norm() for weight in untrained.model.parameters())),
        "perplexity": [entry["eval_perplexity"] for entry in log if "eval_perplexity" in entry],
        "memories": sorted(file.name for file in (path / "halved" / "checkpoint-6").glob("memory_*")),
        "whole": whole,
        "resumed": learn_gates(path / "halved", rows),
    }
    (path / f"rank{state.process_index}.json").write_text(json.dumps(results))
    state.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
