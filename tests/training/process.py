"""One of several processes that train a language model, without and with gates; `launch` starts this module."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from compressor.tasks import Data
from compressor.training.checkpoints import digest
from compressor.training.fit import GateSetup
from tests import language
from tests.training.gates import NoisyGate
from tests.training.runs import sites_of, stop_after, train_model, without_times


def train_gates(path: Path, data: Data, stop: int | None = None) -> dict[str, Any]:
    """The result of training gates and model together, with dropout; the run ends early after the step `stop`."""
    folder, gate = language.folder(), NoisyGate(8, 3, 12)
    schedule = language.schedule(batch_size=2)
    log = train_model(
        folder, data, schedule, path, gating=GateSetup(gate, sites_of(folder)), on_progress=stop_after(stop)
    )
    return {"kept": gate.harden().tolist(), "weights": [digest(folder.model), digest(gate)], "log": without_times(log)}


def main(path: Path) -> None:
    """Train in one of several processes, each of which reads its own streams."""
    folder = language.folder(**language.UNDROPPED)
    state = PartialState(cpu=True)
    with state.main_process_first():
        data = language.data(path, folder)
    log = train_model(folder, data, language.schedule(batch_size=2), path / "run")
    whole = train_gates(path / "whole", data)
    with contextlib.suppress(language.EndOfPowerError):
        train_gates(path / "halved", data, stop=7)
    results = {
        "weights": digest(folder.model),
        "norm": float(sum(weight.double().norm() for weight in folder.model.parameters())),
        "perplexity": [entry["eval_perplexity"] for entry in log if "eval_perplexity" in entry],
        "memories": sorted(file.name for file in (path / "halved" / "checkpoint-6").glob("memory_*")),
        "whole": whole,
        "resumed": train_gates(path / "halved", data),
    }
    (path / f"rank{state.process_index}.json").write_text(json.dumps(results))
    state.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
