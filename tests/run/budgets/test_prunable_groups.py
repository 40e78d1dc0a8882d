"""The groups that a budget may remove."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from compressor.config.run import Recipe
from compressor.config.step_list import steps_of
from compressor.config.steps import Units
from compressor.errors import ErrorCode, SiteRefusedError
from compressor.model_folder.access import access_of
from compressor.results import NoteCode
from compressor.run.model_units import prunable_groups
from compressor.units import PrunableGroup, Site
from graph_passes import Refusal
from tests import folders
from tests.faults import fails_with

HEADS = [PrunableGroup(f"heads.{layer}", "heads", 4, 8, 1, f"heads.{layer}.out") for layer in range(2)]
NEURONS = [PrunableGroup(f"neurons.{layer}", "neurons", 32, 1, 8, f"neurons.{layer}.out") for layer in range(2)]
FOLDER = SimpleNamespace(family="bert", access=access_of(folders.bert()))
MODEL: Any = SimpleNamespace(sites=(), groups=(*HEADS, *NEURONS), folder=FOLDER)


def units(**fields: Any) -> Units:
    return Units(**{"macs": "60%", **fields})


def refusal(*groups: PrunableGroup, op: str = "Frobnicate") -> Refusal:
    return Refusal(frozenset(group.name for group in groups), op, "node_7", "no rule for it")


def test_a_group_that_cannot_be_removed_is_refused_by_its_operator() -> None:
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, refused=(HEADS[1].name,)) as caught:
        prunable_groups(units(), MODEL, [refusal(HEADS[1])])
    assert caught.value.exit_code == 8
    assert all(part in str(caught.value) for part in (HEADS[1].name, "Frobnicate", "--skip-refused"))


def test_groups_that_are_skipped_are_noted_once_for_each_operator() -> None:
    refused = [refusal(HEADS[1], NEURONS[1]), refusal(NEURONS[0], op="Twiddle")]
    groups, notes = prunable_groups(units(skip_refused=True), MODEL, refused)
    assert groups == [HEADS[0]]
    assert [note.code for note in notes] == [NoteCode.GROUPS_SKIPPED] * 2
    for note, operator, named in zip(
        notes, ("Frobnicate", "Twiddle"), ([HEADS[1], NEURONS[1]], [NEURONS[0]]), strict=True
    ):
        assert operator in note.text
        assert [group for group in MODEL.groups if group.name in note.text] == named


def test_a_group_without_a_linear_is_skipped_unless_gates_are_learned() -> None:
    model: Any = SimpleNamespace(**{**vars(MODEL), "groups": (replace(HEADS[0], linear=None), *NEURONS)})
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, refused=(HEADS[0].name,)):
        prunable_groups(units(), model, ())
    groups, (note,) = prunable_groups(units(skip_refused=True), model, ())
    assert (groups, note.code) == (NEURONS, NoteCode.GROUPS_SKIPPED)
    assert prunable_groups(units(method="dsp"), model, ()) == (list(model.groups), ())


def test_units_that_are_not_pruned_are_not_refused() -> None:
    refused = [refusal(*HEADS)]
    assert prunable_groups(units(prune_units="neurons"), MODEL, refused) == (NEURONS, ())
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError):
        prunable_groups(units(prune_units="heads", skip_refused=True), MODEL, refused)


def test_experts_are_noted_where_neurons_may_be_removed() -> None:
    network, experts = folders.bert(), nn.Module()
    experts.weight = nn.Parameter(torch.zeros(2, 8, 16))
    network.add_module("experts", experts)
    model: Any = SimpleNamespace(
        **{**vars(MODEL), "folder": SimpleNamespace(family="mixtral", access=access_of(network))}
    )
    for types, codes in (("all", [NoteCode.EXPERTS_KEPT]), ("heads", [])):
        _, notes = prunable_groups(units(prune_units=types), model, ())
        assert [note.code for note in notes] == codes
        assert all("experts" in note.text for note in notes)


def test_a_model_whose_rows_come_after_positions_is_refused() -> None:
    sites = (Site("a", "bidirectional", 4, 4, 8), Site("b", "bidirectional", 4, 4, 8, batch_axis=1))
    model: Any = SimpleNamespace(sites=sites, folder=SimpleNamespace(family="xlnet"))
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, family="xlnet"):
        prunable_groups(units(), model, ())


@pytest.mark.parametrize(
    ("bundle", "parts", "kept", "allowed"),
    [
        (1, 1, (0, 3, 5), True),
        (4, 1, (), True),
        (4, 1, (4, 5, 6, 7), True),
        (4, 1, (0, 1), False),
        (4, 1, (0, 1, 2, 4), False),
        (1, 2, (0, 3, 5, 6), True),
        (1, 2, (0, 1, 2, 3), False),
        (1, 2, (0, 1, 5), False),
    ],
)
def test_units_are_kept_by_whole_bundles_and_equally_in_all_parts(
    bundle: int, parts: int, kept: tuple[int, ...], allowed: bool
) -> None:
    group = PrunableGroup("a", "heads", 8, 4, max(bundle, parts), "a", bundle=bundle, parts=parts)
    assert group.can_keep(kept) is allowed


@pytest.mark.parametrize("engine", [{}, {"precision": "int8"}, {"target": "auto", "precision": "auto"}])
@pytest.mark.parametrize(
    ("fields", "types"),
    [
        ({}, "all"),
        ({"prune_units": "heads"}, "heads"),
        ({"keep": "100%"}, "neurons"),
        ({"keep": "100.0%"}, "neurons"),
        ({"keep": "50%", "method": "taylor"}, "neurons"),
        ({"keep": 4, "method": "reconstruct"}, "heads"),
    ],
)
def test_heads_that_are_kept_are_not_removed_under_a_budget(
    fields: dict[str, Any], types: str, engine: dict[str, str]
) -> None:
    budget = {} if fields.get("method") == "reconstruct" else {"speedup": 2}
    step = steps_of(Recipe(model="model", data="rows.tsv", **budget, **fields, **engine))[-1]
    assert isinstance(step, Units)
    assert step.prune_units == types
