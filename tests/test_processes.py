"""Training in several processes: each reads streams of its own, and together they train as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compressor.training.fit import fit
from tests import language


def test_two_processes_read_streams_of_their_own(tmp_path: Path) -> None:
    held = language.folder(**language.UNDROPPED)
    log = fit(
        held.model,
        language.data(tmp_path, held),
        language.schedule(batch_size=4),
        {},
        tmp_path / "alone",
        lambda done, total: None,
    )
    launch = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    done = subprocess.run(
        [sys.executable, *launch.split(), "--dynamo_backend", "no", "-m", "tests.language", str(tmp_path)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    assert ranks[0]["perplexity"] == pytest.approx(
        [entry["eval_perplexity"] for entry in log if "eval_perplexity" in entry], rel=1e-3
    )
    norm = sum(float(weight.detach().double().norm()) for weight in held.model.parameters())
    assert ranks[0]["norm"] == pytest.approx(norm, rel=1e-4)
