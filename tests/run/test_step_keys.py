"""The key of a step has another value for everything that its result depends on, and for nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compressor.config.run import Recipe
from compressor.config.step_list import steps_of
from compressor.config.steps import STEPS, Blocks, Distill, Follow, Heads, Step, Units, Within
from compressor.run.step_stores import step_keys

EXAMPLES: dict[type[Step], Step] = {
    Follow: Follow(plan=Path("plan.json")),
    Heads: Heads(keep=3),
    Blocks: Blocks(share=0.5),
    Units: Units(macs=0.5),
    Distill: Distill(teacher_outputs=Path("outputs")),
    Within: Within(max_drop=0.1, steps=(Units(max_drop=0.1), Distill())),
}
OTHER_VALUES: dict[str, Any] = {
    "batch_size": 7,
    "seed": 7,
    "training_steps": 7,
    "learning_rate": 0.7,
    "epochs": 7.0,
    "options": {"a": 1},
    "method": "ste",
    "keep": 2,
    "max_drop": 0.7,
    "certify": 0.7,
    "share": 0.7,
    "share_by_kind": {"causal": 0.7},
    "block_size": 8,
    "map_rows": 7,
    "speedup": 7.0,
    "latency": "7ms",
    "ttft": "7ms",
    "cache": 0.7,
    "macs": 0.7,
    "parameters": 0.7,
    "budget_at": ("1x7",),
    "prune_rows": 77,
    "prune_units": "heads",
    "group_by": "query",
    "minutes": 7.0,
    "attempts": 7,
    "steps": (Units(max_drop=0.1, prune_rows=77), Distill()),
    "quantized_share": 0.7,
    "temperature": 7.0,
    "hidden_weight": 7.0,
    **dict.fromkeys(("plan", "maps", "teacher", "start_from", "statistics", "teacher_outputs"), Path("another")),
    "ray": "local",
}
"""Option -> a value that is not its default; switches are turned."""


def key(*steps: Step, hashes: dict[str, str] | None = None, **settings: Any) -> str:
    recipe = Recipe(model="m", data="d", **settings)
    return list(step_keys(steps, recipe, hashes or {"model": "1"}).values())[-1]


def test_every_step_has_an_example() -> None:
    assert set(EXAMPLES) == set(STEPS.values())


@pytest.mark.parametrize(("kind", "option"), [(kind, option) for kind in EXAMPLES for option in kind.model_fields])
def test_every_option_that_decides_the_result_is_part_of_the_key(kind: type[Step], option: str) -> None:
    step = EXAMPLES[kind]
    value = OTHER_VALUES[option] if option in OTHER_VALUES else not getattr(step, option)
    changed = step.model_copy(update={option: value})
    assert (key(step, keep=1) != key(changed, keep=1)) == (option not in step.neutral)


def test_outputs_of_a_teacher_are_rounded_where_they_are_kept() -> None:
    kept = [Distill(teacher_outputs=Path(folder)) for folder in ("a", "b")]
    assert key(kept[0], keep=1) == key(kept[1], keep=1) != key(Distill(), keep=1)


@pytest.mark.parametrize(
    ("settings", "reading"),
    [
        ({"out": "x"}, set()),
        ({"seconds": 3.0}, set()),
        ({"max_length": 64}, {Heads, Blocks, Units, Distill}),
        ({"match_dense": True, "macs": 0.5}, {Heads, Blocks, Units, Distill}),
        ({"threads": 3}, {Blocks, Units}),
        ({"opset": 23}, {Units}),
        ({"calibration_rows": 7, "precision": "int8"}, {Units}),
        ({"allow_float_products": True, "precision": "int8"}, {Units}),
    ],
)
def test_settings_of_the_run_are_part_of_the_keys_of_steps_that_read_them(
    settings: dict[str, Any], reading: set[type[Step]]
) -> None:
    plain: dict[str, Any] = {name: settings[name] for name in ("precision", "macs") if name in settings} or {"keep": 1}
    changed = {**plain, **settings}
    for kind in (Heads, Blocks, Units, Distill):
        assert (key(EXAMPLES[kind], **plain) != key(EXAMPLES[kind], **changed)) == (kind in reading), kind


def test_a_step_depends_on_those_before_it_and_on_the_model() -> None:
    assert key(Follow(plan=Path("a")), Distill(), keep=1) != key(Follow(plan=Path("b")), Distill(), keep=1)
    heads, units = EXAMPLES[Heads], EXAMPLES[Units]
    assert key(units, keep=1) != key(heads, units, keep=1) != key(Heads(keep=2), units, keep=1)
    assert key(heads, keep=1) != key(heads, keep=1, hashes={"model": "2"})
    names = step_keys([units, Distill(), units, Distill()], Recipe(model="m", data="d", keep=1), {})
    assert list(names) == ["units", "distill", "units-2", "distill-2"]
    assert len(set(names.values())) == 4


def test_the_content_of_named_files_is_part_of_the_key(tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    steps = [Distill(teacher=tmp_path / "teacher"), Follow(plan=tmp_path / "plan.json")]
    for step, file in zip(steps, ("teacher/model.safetensors", "plan.json"), strict=True):
        keys = set()
        for content in (b"1", b"2", b"2"):
            (tmp_path / file).write_bytes(content)
            keys.add(key(step, keep=1))
        assert len(keys) == 2
    keys = set()
    for content in (b"1", b"2"):
        (tmp_path / "kernel").write_bytes(content)
        keys.add(key(Blocks(share=0.5), drop_blocks=0.5, kernel=tmp_path / "kernel"))
    assert len(keys) == 2


def test_weights_that_round_depend_on_the_precision() -> None:
    settings: dict[str, Any] = {"macs": 0.5, "distill": True, "quantized_share": 0.5}
    keys = {key(Distill(quantized_share=0.5), **settings, precision=precision) for precision in ("int8", "auto")}
    assert len(keys) == 2


def test_the_loss_that_ends_a_search_is_part_of_its_key() -> None:
    def key_of(**fields: Any) -> str:
        recipe = Recipe(model="m", data="rows.tsv", method="astar", **fields)
        return step_keys(steps_of(recipe), recipe, {})["heads"]

    assert key_of(max_drop=0.01) != key_of(max_drop=0.02)
    assert key_of(max_drop=0.01, keep=3) == key_of(max_drop=0.02, keep=3)
