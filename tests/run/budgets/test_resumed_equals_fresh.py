"""A run that resumes in the store of an earlier recipe has the plan and the weights of a run in an empty store."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch

import compressor
from compressor.block_masks.mask_selector import AttentionTimer, SiteTimes
from compressor.config.run import Recipe
from compressor.config.steps import Blocks, Distill, Heads, Step, Units
from compressor.errors import CompressorError, ErrorCode, UsageError
from compressor.progress import ProgressCallback
from tests.run.listeners import RecordingListener, interrupt
from tests.run.runs import Learned, learn

SHORT: dict[str, Any] = {"training_steps": 2, "batch_size": 8}
DISTILL = Distill(training_steps=6, batch_size=8, learning_rate=2e-3)
LISTS: dict[str, list[Step]] = {
    "units": [Heads(keep=1, **SHORT), Units(macs=0.7, prune_rows=16), DISTILL],
    "blocks": [Heads(keep=1, **SHORT), Blocks(share=0.5, block_size=1, **SHORT), DISTILL],
    "units and blocks": [Units(macs=0.7, prune_rows=16), Blocks(share=0.5, block_size=1, **SHORT)],
}
TRUE, NEVER = (False, True), ()
OPTIONS: dict[str, Sequence[Any]] = {
    "options": ({}, {"evaluations": 1}),
    "epochs": (None, 0.5),
    "training_steps": (2, 3),
    "batch_size": (8, 4),
    "learning_rate": (5e-5, 1e-3),
    "seed": (0, 1),
    "Distill.training_steps": (6, 8),
    "Distill.learning_rate": (2e-3, 1e-3),
    "Heads.method": ("dsp", "ste", "hard-concrete"),
    "Heads.keep": (1, 2),
    "Heads.max_drop": NEVER,
    "Heads.certify": NEVER,
    "ray": NEVER,
    "share": (0.5, 0.25),
    "share_by_kind": ({}, {"bidirectional": 0.75}),
    "block_size": (1, 8),
    "maps": NEVER,
    "map_rows": (2000, 8),
    **dict.fromkeys(("random_blocks", "count_causal_zeros", "weight_by_count", "allow_empty_rows"), TRUE),
    **dict.fromkeys(("mask_all_sites", "entmax", "from_original_weights", "skip_refused"), TRUE),
    "Units.method": ("reconstruct", "fisher", "magnitude"),
    "speedup": (None, 1.2),
    "latency": (None, "1ms"),
    "ttft": NEVER,
    "cache": NEVER,
    "macs": (0.7, 0.6),
    "parameters": (None, 0.95),
    "Units.keep": NEVER,
    "Units.max_drop": (None, 0.9),
    "Units.certify": NEVER,
    "budget_at": ((), ("1x8",)),
    "prune_units": ("all", "neurons"),
    "group_by": ("kv", "query"),
    "prune_rows": (16, 24),
    "statistics": (None, Path("statistics")),
    "start_from": NEVER,
    "teacher": (None, Path("model")),
    "minutes": (None, 9.0),
    "teacher_outputs": (None, Path("outputs")),
    "quantized_share": (0.0, 0.5),
    "temperature": (2.0, 3.0),
    "hidden_weight": (1.0, 0.0),
}
"""Option, with its step where others have one of its name -> values; none where it excludes what the lists have."""
SETTINGS: dict[str, Sequence[Any]] = {
    "max_length": (8, 7),
    "calibration_rows": (512, 9),
    "keep_unread_positions": TRUE,
    "threads": (1, 2),
    "batch": ((1,), (2,)),
    "seq": ((8,), (6,)),
    "opset": (18, 23),
}


def values_of(step: Step, option: str) -> Sequence[Any]:
    name = f"{type(step).__name__}.{option}"
    return OPTIONS[name] if name in OPTIONS else OPTIONS[option]


class InterruptedAnywhere(RecordingListener):
    """Interrupts a run at an event, which is the beginning of a stage or its progress, and when all is learned."""

    def __init__(self, events: int) -> None:
        super().__init__("compressed: exporting", interrupt)
        self.events = events

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        with super().stage(name):
            self._count()
            yield lambda finished, total: self._count()

    def _count(self) -> None:
        self.events -= 1
        if self.events == 0:
            interrupt()


def edited(steps: Sequence[Step], settings: Mapping[str, Any], rng: random.Random) -> tuple[list[Step], dict[str, Any]]:
    """The steps and settings with another value of one option that they allow."""
    while True:
        changed, new_settings = list(steps), dict(settings)
        number = rng.randrange(len(steps) + 1)
        if number == len(steps):
            name = rng.choice(sorted(SETTINGS))
            new_settings[name] = rng.choice(SETTINGS[name])
        else:
            option = rng.choice(sorted(type(steps[number]).model_fields))
            if values := values_of(steps[number], option):
                with suppress(pydantic.ValidationError):
                    changed[number] = type(steps[number])(**{**dict(steps[number]), option: rng.choice(values)})
        if (changed, new_settings) != (list(steps), dict(settings)):
            with suppress(UsageError):  # steps and settings may exclude each other
                Recipe(model="model", data="rows.tsv", steps=changed, **new_settings)
                return changed, new_settings


def located(steps: Sequence[Step], inputs: Path, folder: Path) -> list[Step]:
    """The steps, with the folders that they name inside of another."""
    folders = {"teacher": inputs / "model", "statistics": folder / "statistics", "teacher_outputs": folder / "outputs"}
    return [
        step.model_copy(update={name: path for name, path in folders.items() if getattr(step, name, None) is not None})
        for step in steps
    ]


def result_of(recipe: Recipe) -> Learned | ErrorCode:
    """What a run learns, or the code of its error."""
    try:
        return learn(recipe)
    except CompressorError as error:
        return error.code


@pytest.fixture
def fixed_attention_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(timer: object, site: object, mask: object, length: int, batch: int, *, masked: bool) -> SiteTimes:
        return SiteTimes(length, {"whole": 2.0, "masked": 3.0, "block-sparse": 1.0}, batch)

    monkeypatch.setattr(AttentionTimer, "times", times)


@pytest.mark.usefixtures("times_by_macs", "fixed_attention_times")
@pytest.mark.parametrize(
    "name", ["units", *(pytest.param(name, marks=pytest.mark.zoo) for name in LISTS if name != "units")]
)
@pytest.mark.parametrize(
    ("seed", "edits"), [(0, 1), *(pytest.param(seed, 6, marks=pytest.mark.zoo) for seed in range(1, 9))]
)
def test_a_resumed_run_equals_a_fresh_one(name: str, seed: int, edits: int, inputs: Path, tmp_path: Path) -> None:
    rng = random.Random(f"{name} {seed}")
    steps, settings = LISTS[name], {option: values[0] for option, values in SETTINGS.items()}

    def recipe(out: str, folder: str) -> Recipe:
        fields = {"model": inputs / "model", "data": str(inputs / "rows.tsv"), "seconds": 0.01, "force": True}
        return Recipe(**fields, **settings, out=tmp_path / out, steps=located(steps, inputs, tmp_path / folder))

    history = [str(steps)]
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(recipe("resumed", "shared"), InterruptedAnywhere(rng.randrange(5, 60)))
    for number in range(edits):
        steps, settings = edited(steps, settings, rng)
        history.append(f"{steps} {settings}")
        resumed = result_of(recipe("resumed", "shared"))
        fresh = result_of(recipe(f"fresh {number}", f"folders {number}"))
        if isinstance(fresh, ErrorCode) or isinstance(resumed, ErrorCode):
            assert resumed == fresh, history
            continue
        assert resumed.selected.plan == fresh.selected.plan, history
        assert all(torch.equal(resumed.weights[key], weight) for key, weight in fresh.weights.items()), history


def test_every_option_of_the_steps_is_drawn() -> None:
    for kind in (Heads, Blocks, Units, Distill):
        for option in kind.model_fields:
            assert option in OPTIONS or f"{kind.__name__}.{option}" in OPTIONS, (kind, option)
