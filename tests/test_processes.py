"""Training in several processes: each reads streams of its own, and together they train as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.training.fit import fit
from tests import language
from tests.launch import launch


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
    ranks = launch("tests.language", tmp_path)
    assert ranks[0] == ranks[1]
    assert ranks[0]["perplexity"] == pytest.approx(
        [entry["eval_perplexity"] for entry in log if "eval_perplexity" in entry], rel=1e-3
    )
    norm = sum(float(weight.detach().double().norm()) for weight in held.model.parameters())
    assert ranks[0]["norm"] == pytest.approx(norm, rel=1e-4)
