"""What a training multiplies its matrices in where it may choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.progress import NullListener
from compressor.training import train
from compressor.training.schedule import Schedule
from tests import language


@pytest.mark.parametrize(
    ("there", "native", "asked", "chosen"),
    [
        (True, True, "auto", "bf16"),
        (True, False, "auto", "no"),  # V100 and T4 emulate bfloat16, more slowly than they compute in float32
        (False, False, "auto", "no"),
        (True, False, "bf16", "bf16"),
        (True, True, "no", "no"),
    ],
)
def test_bfloat16_is_chosen_where_the_device_has_it_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: bool, native: bool, asked: str, chosen: str
) -> None:
    found = []

    def fit(model: Any, data: Any, schedule: Schedule, *rest: Any, **more: Any) -> list[dict[str, object]]:
        found.append(schedule.mixed_precision)
        return []

    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    monkeypatch.setattr(train, "fit", fit)
    held = language.folder()
    data = language.data(tmp_path, held)
    train._fit(language.asked(mixed_precision=asked), held, data, tmp_path, NullListener(), lambda done, total: None)
    assert found == [chosen]
