"""The times of stages, among them stages that run several times."""

from __future__ import annotations

import time

import pytest

from compressor.progress import RunLog
from tests.run.listeners import RecordingListener


def test_the_times_of_a_repeated_stage_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 2.0, 10.0, 13.0, 20.0, 21.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    log = RunLog(RecordingListener())
    for name in ("timing", "timing", "refitting"):
        with log.stage(name):
            pass
    assert log.seconds == {"timing": 5.0, "refitting": 1.0}
