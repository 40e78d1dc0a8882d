"""The method `reconstruct` from beginning to end: kept units, interruption, and the weights that it leaves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compressor.errors import ErrorCode, InputError
from compressor.progress import ignore_progress
from compressor.results import NoteCode
from compressor.selection.pruners.base import PruningInputs
from compressor.selection.pruners.layerwise import layer_run
from compressor.selection.pruners.reconstruct import pruner as reconstruct
from compressor.selection.pruners.reconstruct.method import GroupChoice
from compressor.selection.pruners.reconstruct.pruner import ReconstructOptions, ReconstructPruner
from compressor.workdir import RESULT_KEY
from tests.faults import fails_with
from tests.selection.pruners.pruning import (
    Interrupter,
    InterruptionError,
    are_equal,
    check_dropped_units_have_no_effect,
    check_kept_counts,
    check_labels_are_not_read,
    family_inputs,
    random_counts,
    ranked,
    result_of,
)
from tests.unchanged import unchanged
from tests.zoo import text

FAMILIES = [pytest.param("bert", marks=pytest.mark.zoo), pytest.param("gpt2", marks=pytest.mark.zoo), "llama", "t5"]
"""BERT keeps these promises among all methods, in `tests.selection.pruners.test_base`."""


def few_groups(inputs: PruningInputs) -> PruningInputs:
    """The inputs with the groups of the first layers."""
    return replace(inputs, groups=inputs.groups[:3])


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_units_are_kept_as_requested_and_dropped_ones_have_no_effect(family: str, tmp_path: Path) -> None:
    inputs = family_inputs(family, tmp_path)
    with unchanged(inputs.model):
        check_kept_counts(pruner := ranked(ReconstructPruner, inputs))
    check_dropped_units_have_no_effect(pruner)


def test_as_many_tokens_as_a_linear_has_inputs_are_needed(tmp_path: Path) -> None:
    inputs = family_inputs("bert", tmp_path)
    few, enough = ([text(rows, seed=1)] for rows in (6, 7))  # 40 and 47 tokens
    with fails_with(ErrorCode.TOO_FEW_ROWS, InputError, group="bert.encoder.layer.0.output.dense", rows=6, needed=7):
        ReconstructPruner(replace(inputs, statistics=few))
    with unchanged(inputs.model):
        ranked(ReconstructPruner, replace(inputs, statistics=enough))


def test_query_heads_stay_with_their_key_value_head(tmp_path: Path) -> None:
    pruner = ranked(ReconstructPruner, family_inputs("llama", tmp_path))
    heads = [group for group in pruner.inputs.groups if group.type == "heads"]
    assert [(group.units, group.bundle, group.counts) for group in heads] == [(4, 2, (0, 2, 4))] * 3
    for group in heads:
        assert pruner.kept(group, 2) in ((0, 1), (2, 3))


@pytest.mark.parametrize("family", ["bert", pytest.param("gpt2", marks=pytest.mark.zoo)])
def test_labels_are_not_read(family: str, tmp_path: Path) -> None:
    check_labels_are_not_read(ReconstructPruner, family, tmp_path)


@pytest.mark.parametrize("part", [pytest.param("rank", marks=pytest.mark.zoo), "losses"])
def test_an_interrupted_run_gives_the_same_result(part: str, tmp_path: Path) -> None:
    inputs = few_groups(family_inputs("llama", tmp_path / "interrupted"))
    expected = result_of(ReconstructPruner, replace(inputs, store=tmp_path / "whole"))
    pruner = ReconstructPruner(inputs)
    if part == "losses":
        pruner.rank(ignore_progress)
    with unchanged(inputs.model), pytest.raises(InterruptionError):
        getattr(pruner, part)(Interrupter(2))
    assert are_equal(result_of(ReconstructPruner, inputs), expected)


@pytest.mark.parametrize(
    ("family", "limit"),
    [
        ("bert", 30_000),
        *(pytest.param("bert", limit, marks=pytest.mark.zoo) for limit in (0, 200_000)),
        *(pytest.param("t5", limit, marks=pytest.mark.zoo) for limit in (0, 30_000, 200_000)),
    ],
)
def test_activations_that_do_not_fit_into_memory_are_computed_alongside(
    family: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = family_inputs(family, tmp_path)  # the losses, which do not depend on it, are stored
    expected = result_of(ReconstructPruner, inputs)
    monkeypatch.setattr(layer_run, "kept_bytes", lambda model: limit)
    result = result_of(ReconstructPruner, inputs)
    assert result[:2] == expected[:2]
    for name, weight in result[2].state_dict().items():
        torch.testing.assert_close(weight, expected[2].state_dict()[name])


def test_less_is_kept_of_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_run, "_PROCESS_BYTES", 1 << 60)
    small, base, large = (torch.nn.Linear(size, size, device="meta") for size in (1000, 10_000, 100_000))
    assert layer_run.kept_bytes(small) > layer_run.kept_bytes(base) > layer_run.kept_bytes(large) >= 1 << 30


@pytest.mark.parametrize(
    ("different_rows", "options", "raised"),
    [
        (1, ReconstructOptions(damp=1e-18), True),
        (1, ReconstructOptions(), False),
        (24, ReconstructOptions(damp=1e-18), False),
        (1, ReconstructOptions(ridge=1e-18), True),
    ],
)
def test_raised_damping_is_noted(
    different_rows: int, options: ReconstructOptions, raised: bool, tmp_path: Path
) -> None:
    """Gram matrices of one repeated row are singular."""
    inputs = few_groups(family_inputs("bert", tmp_path))
    inputs.model.double()  # sums in float32 round more than this damping adds
    rows = text(24, length=8, seed=1)
    repeated = {name: value[:different_rows].repeat(24 // different_rows, 1) for name, value in rows.items()}
    pruner = ReconstructPruner(replace(inputs, statistics=[repeated]), options)
    pruner.rank(ignore_progress)
    before = pruner.notes
    pruner.finish(random_counts(inputs.groups))
    assert before == ()
    assert [note.code for note in pruner.notes] == [NoteCode.DAMPING_RAISED] * raised
    assert all(any(group.name in note.text for group in inputs.groups) for note in pruner.notes)


def test_damping_of_an_earlier_plan_is_not_noted(tmp_path: Path) -> None:
    inputs = family_inputs("bert", tmp_path)
    inputs.model.double()
    rows = [text(24, length=8, seed=1)]
    pruner = ReconstructPruner(replace(inputs, statistics=rows), ReconstructOptions(ridge=1e-18))
    pruner.rank(ignore_progress)
    whole = {name: tensor.clone() for name, tensor in inputs.model.state_dict().items()}
    pruner.finish(random_counts(inputs.groups))
    assert pruner.notes
    inputs.model.load_state_dict(whole)
    pruner.finish({group.name: group.units for group in inputs.groups})
    assert pruner.notes == ()


def test_finished_parts_are_read_from_the_store(tmp_path: Path) -> None:
    inputs = few_groups(family_inputs("bert", tmp_path))
    pruner = ranked(ReconstructPruner, inputs)
    with pytest.raises(InterruptionError):
        pruner.losses(Interrupter(3))
    stored = {part.inputs["group"]: part.folder / "result.json" for part in pruner.store.stored("loss-*")}
    assert stored.keys() == {group.name for group in inputs.groups[:2]}
    first = stored[inputs.groups[0].name]
    first.write_text(json.dumps({**json.loads(first.read_text()), "0": 1234.5}))
    resumed = ReconstructPruner(inputs)
    passes = set[int]()
    resumed.rank(lambda finished, total: passes.add(total))
    assert passes == {len(inputs.statistics)}  # the Gram matrices are read, and not summed up in a second pass
    losses = resumed.losses(ignore_progress)
    assert list(losses) == [group.name for group in inputs.groups]
    assert losses[inputs.groups[0].name][0] == 1234.5


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_refused_by_group_and_not_stored(
    loss: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = family_inputs("bert", tmp_path)
    first, second, *_ = (group.name for group in inputs.groups)

    def curve(choice: GroupChoice, divergence: object) -> dict[int, float]:
        return dict.fromkeys(choice.group.counts, 0.0 if choice.group.name == first else loss)

    pruner = ranked(ReconstructPruner, inputs)
    monkeypatch.setattr(reconstruct, "loss_curve", curve)
    with fails_with(ErrorCode.NOT_FINITE, InputError, group=second):
        pruner.losses(ignore_progress)
    assert [stored.inputs["group"] for stored in pruner.store.stored("loss-*")] == [first]


def test_a_curve_covers_every_number_of_units(tmp_path: Path) -> None:
    inputs = family_inputs("t5", tmp_path)
    pruner = ranked(ReconstructPruner, replace(inputs, groups=inputs.groups[::4]))
    losses = pruner.losses(ignore_progress)
    for group in pruner.inputs.groups:
        assert tuple(losses[group.name]) == group.counts
        assert losses[group.name][group.units] == 0
        assert losses[group.name][0] > 0


def test_damaged_files_of_the_store_are_made_again(tmp_path: Path) -> None:
    inputs = few_groups(family_inputs("bert", tmp_path / "damaged"))
    expected = result_of(ReconstructPruner, replace(inputs, store=tmp_path / "whole"))
    result_of(ReconstructPruner, inputs)
    for file in inputs.store.rglob("*"):
        if file.is_file() and file.name != RESULT_KEY:
            file.write_bytes(b'{"a')
    assert are_equal(result_of(ReconstructPruner, inputs), expected)
