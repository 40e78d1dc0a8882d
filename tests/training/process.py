"""Training a language model, without and with gates, in one of several processes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

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


def train_together(path: Path) -> dict[str, Any]:
    """Results of training in one of several processes, each of which reads its own streams."""
    folder = language.folder(**language.UNDROPPED)
    state = PartialState(cpu=True)
    with state.main_process_first():
        data = language.data(path, folder)
    log = train_model(folder, data, language.schedule(batch_size=2), path / "run")
    whole = train_gates(path / "whole", data)
    with contextlib.suppress(language.EndOfPowerError):
        train_gates(path / "halved", data, stop=7)
    return {
        "weights": digest(folder.model),
        "norm": float(sum(weight.double().norm() for weight in folder.model.parameters())),
        "perplexity": [entry["eval_perplexity"] for entry in log if "eval_perplexity" in entry],
        "memories": sorted(file.name for file in (path / "halved" / "checkpoint-6").glob("memory_*")),
        "whole": whole,
        "resumed": train_gates(path / "halved", data),
    }
