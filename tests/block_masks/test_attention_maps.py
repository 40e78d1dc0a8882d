"""Attention maps: averages over the rows that have both positions, on disk, cropped, and compared with a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.block_masks.attention_maps import (
    AttentionMaps,
    build_masks,
    collect_attention_maps,
    density,
    mask_length,
    shares_by_kind,
    unreached_share,
)
from compressor.config.steps import Blocks
from compressor.errors import ErrorCode
from compressor.model_folder import example_inputs, fingerprint
from compressor.models.forwards import tensors_of
from compressor.units import Site, find_sites, hooked, keep_all, keep_only
from compressor.units.hook import Call
from graph_passes import BlockMask, Kind, Plan, PlanError
from tests import language
from tests.block_masks.maps import plan_of, random_maps
from tests.faults import fails_with
from tests.selection import tiny

SITE = Site("a", "bidirectional", 3, 3, 4)
SITES = [Site("a", "causal", 2, 2, 4), Site("b", "bidirectional", 2, 2, 4), Site("c", "causal", 2, 2, 4)]


def test_maps_and_masks_are_read_as_written(tmp_path: Path) -> None:
    maps = replace(random_maps("causal", memory=8), hidden={"a": np.triu(np.ones((20, 28), np.bool_))})
    maps.save(tmp_path / "maps.safetensors")
    loaded = AttentionMaps.load(tmp_path / "maps.safetensors")
    np.testing.assert_array_equal(loaded.maps["a"], maps.maps["a"])
    np.testing.assert_array_equal(loaded.counts["a"], maps.counts["a"])
    np.testing.assert_array_equal(loaded.hidden["a"], maps.hidden["a"])
    assert (loaded.kinds, loaded.memory, loaded.model, loaded.data) == (maps.kinds, 8, "sha256:m", "sha256:d")
    masked = plan_of("causal").masked(build_masks(maps, plan_of("causal"), {"causal": 0.5}, 8))
    masked.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == masked


def test_a_plan_without_its_masks_is_refused(tmp_path: Path) -> None:
    plan_of().masked({"a": BlockMask(np.ones((3, 2, 2), np.bool_))}).save(tmp_path / "plan.json")
    (tmp_path / "plan.safetensors").unlink()
    with pytest.raises(PlanError):
        Plan.load(tmp_path / "plan.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with fails_with(ErrorCode.FILE_MISSING, path=tmp_path / "nowhere"):
        AttentionMaps.load(tmp_path / "nowhere")


def test_a_file_without_maps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    path.write_bytes(b"no maps")
    with fails_with(ErrorCode.FILE_UNREADABLE, path=path):
        AttentionMaps.load(path)
    for metadata in (None, {"kinds": "[]", "memory": "0"}):
        safetensors.numpy.save_file({"x": np.ones(1)}, path, metadata=metadata)
        with fails_with(ErrorCode.FILE_UNREADABLE, path=path):
            AttentionMaps.load(path)


def test_maps_of_longer_rows_are_cropped() -> None:
    maps = replace(random_maps("causal", length=20, memory=8), hidden={"a": np.triu(np.ones((20, 28), np.bool_))})
    cropped = maps.cropped(12)
    assert cropped.length == 12
    np.testing.assert_array_equal(cropped.maps["a"], maps.maps["a"][:, :12, :20])
    np.testing.assert_array_equal(cropped.counts["a"], maps.counts["a"][:12, :20])
    np.testing.assert_array_equal(cropped.hidden["a"], maps.hidden["a"][:12, :20])


def test_maps_of_the_model_are_accepted() -> None:
    random_maps().check([SITE], memory=0)
    random_maps(memory=4).check([SITE], memory=4)


@pytest.mark.parametrize(
    ("sites", "change", "details"),
    [
        ([SITE, replace(SITE, name="b")], {}, {"field": "site", "value": "b"}),
        ([replace(SITE, name="b")], {}, {"field": "site", "value": "a"}),
        ([SITE], {"maps": {}, "counts": {}, "kinds": {}}, {"field": "site", "value": "a"}),
        ([replace(SITE, heads=4)], {}, {"field": "heads", "value": 3, "site": "a"}),
        ([replace(SITE, kind="cross")], {}, {"field": "kind", "value": "bidirectional", "site": "a"}),
        ([SITE], {"counts": {"a": np.ones((20, 19))}}, {"field": "count", "value": (20, 19), "site": "a"}),
        ([SITE], {"maps": {"a": np.ones((3, 19, 20))}}, {"field": "map", "value": (19, 20), "site": "a"}),
        ([SITE], {"hidden": {"a": np.ones((20, 19))}}, {"field": "hidden", "value": (20, 19), "site": "a"}),
        ([SITE], {"memory": 4}, {"field": "memory", "value": 4}),
    ],
)
def test_maps_of_another_model_are_refused(sites: list[Site], change: dict[str, Any], details: dict[str, Any]) -> None:
    with fails_with(ErrorCode.FILE_MISMATCH, **details):
        replace(random_maps(), **change).check(sites, memory=0)


@settings(max_examples=40, deadline=None)
@given(
    share=st.floats(0.01, 1.0),
    kind=st.sampled_from(["bidirectional", "causal", "cross"]),
    block=st.sampled_from([1, 8, 16, 64]),
    length=st.integers(8, 40),
    memory=st.sampled_from([0, 8, 13]),
    kept=st.sampled_from([(0, 1, 2), (0, 2), (1,)]),
    is_random=st.booleans(),
    empty=st.booleans(),
)
def test_exactly_the_share_of_the_counted_blocks_is_dropped(
    share: float, kind: Kind, block: int, length: int, memory: int, kept: tuple[int, ...], is_random: bool, empty: bool
) -> None:
    """Fewer blocks are dropped only if a row would become empty and empty rows are not allowed."""
    maps, plan = random_maps(kind, length=length, memory=memory, seed=length), plan_of(kind, kept=kept)
    seed = 1 if is_random else None
    mask = build_masks(maps, plan, {kind: share}, block, seed=seed, allow_empty_rows=empty)["a"]
    rows, columns = -(-length // block), -(-(length + memory) // block)
    last = [min((row + 1) * block, length) - 1 for row in range(rows)]
    counted = np.array(
        [[kind != "causal" or column * block - memory <= last[row] for column in range(columns)] for row in range(rows)]
    )
    removed_heads = [head for head in range(3) if head not in kept]
    assert not mask.kept[removed_heads].any()
    assert not (mask.kept & ~counted).any()
    population = len(kept) * int(counted.sum())
    exact = population - round(share * population)
    remaining = int(mask.kept.sum())
    assert remaining == (exact if empty else max(exact, len(kept) * rows))
    assert empty or mask.kept[list(kept)].any(axis=2).all()
    assert density(mask, maps, "a", kept).mean() == pytest.approx(remaining / population)


@settings(max_examples=20, deadline=None)
@given(
    share=st.floats(0.01, 0.99),
    kind=st.sampled_from(["bidirectional", "causal"]),
    block=st.sampled_from([1, 8]),
    seed=st.integers(0, 99),
)
def test_with_weights_the_least_attention_over_all_rows_is_dropped(
    share: float, kind: Kind, block: int, seed: int
) -> None:
    length = 24
    maps = random_maps(kind, length=length, seed=seed)
    lengths = np.random.default_rng(seed).integers(1, length + 1, 50)
    has_position = np.arange(length)[:, None] < lengths
    counts = np.einsum("qn,kn->qk", has_position, has_position).astype(np.float32) + 1.0
    equal, weighted = (
        build_masks(replace(maps, counts={"a": row_counts}), plan_of(kind), {kind: share}, block, weight_by_count=True)[
            "a"
        ]
        for row_counts in (np.ones_like(counts), counts)
    )
    unweighted = build_masks(replace(maps, counts={"a": counts}), plan_of(kind), {kind: share}, block)["a"]
    np.testing.assert_array_equal(equal.kept, unweighted.kept, "equal counts are no weights")
    assert weighted.kept.sum() == unweighted.kept.sum()
    if kind == "bidirectional":  # a causal block can have few counted entries
        kept_attention = [
            (mask.entries(length, length) * maps.maps["a"] * counts).sum() for mask in (weighted, unweighted)
        ]
        assert kept_attention[0] >= kept_attention[1] * (1 - 1e-5)


def test_blocks_with_the_least_attention_are_dropped_and_ties_by_index() -> None:
    maps = random_maps(heads=1, length=4)
    maps.maps["a"][0] = [[1, 2, 3, 4], [1, 1, 1, 1], [9, 0, 0, 0], [5, 6, 7, 8]]
    mask = build_masks(maps, plan_of(heads=1, kept=(0,)), {"bidirectional": 7 / 16}, 1)["a"]
    assert mask.kept[0].astype(int).tolist() == [[0, 1, 1, 1], [0, 0, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_a_row_keeps_its_strongest_block_and_the_next_weakest_is_dropped() -> None:
    maps = random_maps(heads=1, length=3)
    maps.maps["a"][0] = [[0.1, 0.3, 0.2], [6, 5, 7], [8, 8, 8]]
    mask = build_masks(maps, plan_of(heads=1, kept=(0,)), {"bidirectional": 3 / 9}, 1)["a"]
    assert mask.kept[0].astype(int).tolist() == [[0, 1, 0], [1, 0, 1], [1, 1, 1]]


def test_a_row_that_may_be_empty_loses_its_strongest_block_before_a_stronger_one() -> None:
    maps = random_maps(heads=1, length=3)
    maps.maps["a"][0] = [[0.1, 0.3, 0.2], [6, 5, 7], [8, 8, 8]]
    mask = build_masks(maps, plan_of(heads=1, kept=(0,)), {"bidirectional": 3 / 9}, 1, allow_empty_rows=True)["a"]
    assert mask.kept[0].astype(int).tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_random_masks_do_not_depend_on_the_maps(share: float) -> None:
    """This holds even if a row would lose every block."""
    first, second = (
        build_masks(random_maps(length=16, seed=seed), plan_of(), {"bidirectional": share}, 8, seed=3)["a"]
        for seed in (0, 1)
    )
    assert first == second


def test_kinds_without_a_share_and_sites_without_heads_have_no_mask() -> None:
    assert build_masks(random_maps(), plan_of(), {"causal": 0.5}, 8) == {}
    assert build_masks(random_maps(), plan_of(), {"bidirectional": 0.0}, 8) == {}
    assert build_masks(random_maps(), plan_of(kept=()), {"bidirectional": 0.5}, 8) == {}


def test_blocks_that_no_row_reaches_are_not_counted_and_are_kept() -> None:
    maps = random_maps(heads=1, length=4)
    maps.counts["a"][:, 3] = 0
    maps.counts["a"][3] = 0
    mask = build_masks(maps, plan_of(heads=1, kept=(0,)), {"bidirectional": 1 / 3}, 1)["a"]
    assert mask.kept[0, 3].all()
    assert mask.kept[0, :, 3].all()
    assert int(mask.kept[0, :3, :3].sum()) == 6


def test_the_share_of_blocks_that_no_row_reaches_is_reported() -> None:
    maps = random_maps("causal", heads=1, length=16)
    assert unreached_share(maps, ["a"], 8) == 0
    maps.counts["a"][8:] = 0
    assert unreached_share(maps, ["a"], 8) == pytest.approx(2 / 3)
    assert unreached_share(maps, (), 8) == 0.0


def test_a_small_share_drops_only_the_future_if_it_counts() -> None:
    """As the paper's own code does: the zeros above the diagonal are dropped first."""
    maps, plan = random_maps("causal", heads=1, length=8), plan_of("causal", heads=1, kept=(0,))
    maps.maps["a"][0] *= np.tril(np.ones((8, 8)))
    assert int(build_masks(maps, plan, {"causal": 0.2}, 1, count_causal_zeros=True)["a"].kept.sum()) == 36
    assert int(build_masks(maps, plan, {"causal": 0.2}, 1)["a"].kept.sum()) == 36 - round(0.2 * 36)


@given(st.integers(0, 20), st.integers(1, 12), st.integers(0, 13), st.sampled_from([1, 8]))
@settings(max_examples=30, deadline=None)
def test_positions_align_with_those_before(past: int, queries: int, memory: int, block: int) -> None:
    draw = np.random.default_rng(0)
    mask = BlockMask(draw.random((2, -(-33 // block), -(-46 // block))) < 0.5, block, memory=13)
    entries = mask.entries(queries, memory + 20, past=past, memory=memory)
    for row, column in [(0, 0), (queries - 1, memory + 19)]:
        position = column - memory
        assert (entries[:, row, column] == mask.kept[:, (past + row) // block, (position + 13) // block]).all()


def test_a_share_by_kind_overrides_the_common_one() -> None:
    step = Blocks(share=0.5, share_by_kind={"causal": 0.9})
    assert shares_by_kind(step, SITES) == {"causal": 0.9, "bidirectional": 0.5}
    assert shares_by_kind(Blocks(share_by_kind={"causal": 0.9}), SITES) == {
        "causal": 0.9,
        "bidirectional": 0.0,
    }


def test_masks_cover_the_longest_possible_row() -> None:
    model = tiny.classifier()
    assert mask_length(model, tiny.data(), 9) == 9
    assert mask_length(model, tiny.data(), 99) == 16  # positions of the model


def test_masks_of_a_text_cover_its_longest_segment(tmp_path: Path) -> None:
    untrained = language.folder(**language.UNDROPPED)
    assert mask_length(untrained.model, language.data(tmp_path, untrained), 128) == 6


@pytest.mark.parametrize("batch_size", [1, 7])
def test_maps_are_averages_over_the_rows_that_have_both_positions(batch_size: int) -> None:
    model, data = tiny.classifier(), tiny.data()
    sites = tiny.sites_of(model)
    maps = collect_attention_maps(model, sites, data, keep_all(sites), length=9, batch_size=batch_size)
    totals = {site.name: np.zeros((site.heads, 9, 9)) for site in sites}
    count = np.zeros((9, 9))
    for row in data.train:
        size = len(row["input_ids"])

        def add(call: Call, weights: torch.Tensor, size: int = size) -> None:
            totals[call.site][:, :size, :size] += weights[0].numpy()

        with torch.no_grad(), hooked(model.eval(), lambda name, out: out, attention="eager", on_weights=add):
            model(**tensors_of(data.task.collate([row])))
        count[:size, :size] += 1
    for name, total in totals.items():
        np.testing.assert_array_equal(maps.counts[name], count)
        np.testing.assert_allclose(maps.maps[name], total / np.maximum(count, 1), atol=1e-6)
    assert (maps.model, maps.data, maps.memory) == (fingerprint(model), "sha256:rows", 0)


def test_no_more_rows_are_read_than_requested() -> None:
    model, progress = tiny.classifier(), list[tuple[int, int]]()
    sites = tiny.sites_of(model)
    maps = collect_attention_maps(
        model,
        sites,
        tiny.data(),
        keep_all(sites),
        length=9,
        batch_size=4,
        rows=5,
        on_progress=lambda *numbers: progress.append(numbers),
    )
    assert maps.counts[sites[0].name][0, 0] == 5
    assert progress == [(4, 5), (5, 5)]


def test_maps_come_from_the_pruned_model() -> None:
    model = tiny.classifier()
    sites = tiny.sites_of(model)
    plans = keep_all(sites), keep_only(sites, {(site.name, head): 1.0 for site in sites for head in (0, 1)})
    whole, gated = (collect_attention_maps(model, sites, tiny.data(), plan, length=9) for plan in plans)
    first, second = (site.name for site in sites)
    np.testing.assert_array_equal(whole.maps[first], gated.maps[first])
    assert not np.array_equal(whole.maps[second], gated.maps[second])


def test_rows_longer_than_the_maps_are_refused() -> None:
    model = tiny.classifier()
    sites = tiny.sites_of(model)
    with fails_with(ErrorCode.TOO_LONG, length=9, maximum=8):
        collect_attention_maps(model, sites, tiny.data(), keep_all(sites), length=8)


def test_sites_that_no_row_reaches_are_refused() -> None:
    model = tiny.classifier()
    sites = tiny.sites_of(model)
    empty = replace(tiny.data(), train=tiny.rows(1, 0).select([]))
    with fails_with(ErrorCode.TOO_FEW_ROWS, site=sites[0].name):
        collect_attention_maps(model, sites, empty, keep_all(sites), length=9)


def test_a_memory_has_separate_columns(tmp_path: Path) -> None:
    """In one stream the first segment has no memory, the second six positions, the others eight."""
    untrained = language.folder(**language.UNDROPPED)
    data = language.data(tmp_path, untrained)
    sites = find_sites(untrained.model, example_inputs(untrained, 2, 6))
    maps = collect_attention_maps(untrained.model, sites, data, keep_all(sites), length=6, batch_size=1, rows=5)
    for name, counts in maps.counts.items():
        assert counts[0].tolist() == [3, 3, 4, 4, 4, 4, 4, 4, *[5] * 6]
        assert np.isfinite(maps.maps[name]).all()
        assert not maps.maps[name][:, 0, 9:].any()


def test_every_module_keeps_its_mode() -> None:
    model = tiny.classifier().train()
    next(model.children()).eval()
    modes = [module.training for module in model.modules()]
    sites = tiny.sites_of(model)
    collect_attention_maps(model, sites, tiny.data(), keep_all(sites), length=9)
    assert [module.training for module in model.modules()] == modes
