"""Masks cut from attention maps: exact counts, the population, and how positions align."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.block_masks import AttentionMaps, build_masks, density, unreached
from compressor.errors import InputError
from compressor.units import Site
from graph_passes import BlockMask, Kind, Plan, PlanError, SitePlan


def maps(
    kind: Kind = "bidirectional", heads: int = 3, length: int = 20, memory: int = 0, seed: int = 0
) -> AttentionMaps:
    draw = np.random.default_rng(seed)
    shape = (length, length + memory)
    found = draw.random((heads, *shape)).astype(np.float32)
    return AttentionMaps({"a": found}, {"a": np.ones(shape, np.float32)}, {"a": kind}, memory, "sha256:m", "sha256:d")


def plan(kind: Kind = "bidirectional", heads: int = 3, kept: tuple[int, ...] = (0, 1, 2)) -> Plan:
    return Plan(sites=(SitePlan("a", kind, heads, heads, 4, kept),))


@settings(max_examples=40, deadline=None)
@given(
    share=st.floats(0.01, 1.0),
    kind=st.sampled_from(["bidirectional", "causal", "cross"]),
    block=st.sampled_from([1, 8, 16, 64]),
    length=st.integers(8, 40),
    memory=st.sampled_from([0, 8, 13]),
    kept=st.sampled_from([(0, 1, 2), (0, 2), (1,)]),
    drawn=st.booleans(),
    empty=st.booleans(),
)
def test_exactly_the_share_of_what_counts_goes(
    share: float, kind: Kind, block: int, length: int, memory: int, kept: tuple[int, ...], drawn: bool, empty: bool
) -> None:
    """As long as that leaves every row one, or rows may be empty."""
    found = maps(kind, length=length, memory=memory, seed=length)
    mask = build_masks(found, plan(kind, kept=kept), {kind: share}, block, seed=1 if drawn else None, empty_rows=empty)[
        "a"
    ]
    blocks = -(-length // block), -(-(length + memory) // block)
    past = [
        [
            kind != "causal" or column * block - memory <= min((row + 1) * block, length) - 1
            for column in range(blocks[1])
        ]
        for row in range(blocks[0])
    ]
    counted = np.array(past)
    rest = [head for head in range(3) if head not in kept]
    assert not mask.kept[rest].any()
    assert not (mask.kept & ~counted).any()
    left = int(mask.kept.sum())
    exactly = len(kept) * int(counted.sum()) - round(share * len(kept) * int(counted.sum()))
    assert left == (exactly if empty else max(exactly, len(kept) * blocks[0]))
    assert empty or mask.kept[list(kept)].any(axis=2).all()
    assert density(mask, found, "a", kept).mean() == pytest.approx(left / (len(kept) * counted.sum()))


@settings(max_examples=20, deadline=None)
@given(
    share=st.floats(0.01, 0.99),
    kind=st.sampled_from(["bidirectional", "causal"]),
    block=st.sampled_from([1, 8]),
    seed=st.integers(0, 99),
)
def test_weighed_by_rows_least_attention_of_all_rows_goes(share: float, kind: Kind, block: int, seed: int) -> None:
    length = 24
    found = maps(kind, length=length, seed=seed)
    ends = np.random.default_rng(seed).integers(1, length + 1, 50)  # lengths of rows
    reached = np.arange(length)[:, None] < ends
    counts = np.einsum("qn,kn->qk", reached, reached).astype(np.float32) + 1.0
    plain, weighed = (
        build_masks(replace(found, counts={"a": given}), plan(kind), {kind: share}, block, weigh_by_rows=True)["a"]
        for given in (np.ones_like(counts), counts)
    )
    by_mean = build_masks(replace(found, counts={"a": counts}), plan(kind), {kind: share}, block)["a"]
    np.testing.assert_array_equal(plain.kept, by_mean.kept, "rows that all have every pair weigh nothing")
    assert weighed.kept.sum() == by_mean.kept.sum()
    if kind == "bidirectional":  # a causal block may hold few entries that count
        seen = [(mask.entries(length, length) * found.maps["a"] * counts).sum() for mask in (weighed, by_mean)]
        assert seen[0] >= seen[1] * (1 - 1e-5)


def test_the_least_attention_goes_and_ties_go_by_index() -> None:
    found = maps(heads=1, length=4)
    found.maps["a"][0] = [[1, 2, 3, 4], [1, 1, 1, 1], [9, 0, 0, 0], [5, 6, 7, 8]]
    mask = build_masks(found, plan(heads=1, kept=(0,)), {"bidirectional": 7 / 16}, 1)["a"]
    assert mask.kept[0].astype(int).tolist() == [[0, 1, 1, 1], [0, 0, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_a_row_keeps_its_strongest_and_the_next_weakest_goes() -> None:
    found = maps(heads=1, length=3)
    found.maps["a"][0] = [[0.1, 0.3, 0.2], [6, 5, 7], [8, 8, 8]]
    mask = build_masks(found, plan(heads=1, kept=(0,)), {"bidirectional": 3 / 9}, 1)["a"]
    assert mask.kept[0].astype(int).tolist() == [[0, 1, 0], [1, 0, 1], [1, 1, 1]]


def test_a_row_that_may_be_empty_loses_its_strongest_before_a_stronger_one() -> None:
    found = maps(heads=1, length=3)
    found.maps["a"][0] = [[0.1, 0.3, 0.2], [6, 5, 7], [8, 8, 8]]
    mask = build_masks(found, plan(heads=1, kept=(0,)), {"bidirectional": 3 / 9}, 1, empty_rows=True)["a"]
    assert mask.kept[0].astype(int).tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1]]


def test_random_masks_know_nothing_of_the_maps() -> None:
    """Not even where a row would lose every block."""
    one, other = (maps(length=16, seed=seed) for seed in (0, 1))
    for share in (0.5, 0.95):
        drawn = [build_masks(found, plan(), {"bidirectional": share}, 8, seed=3)["a"] for found in (one, other)]
        assert drawn[0] == drawn[1]


def test_maps_of_longer_rows_are_cropped() -> None:
    found = maps("causal", length=20, memory=8)
    part = found.cropped(12)
    assert part.length == 12
    assert (part.maps["a"] == found.maps["a"][:, :12, :20]).all()
    assert (part.counts["a"] == found.counts["a"][:12, :20]).all()


def test_the_share_that_no_example_reaches_is_told() -> None:
    found = maps("causal", heads=1, length=16)
    assert unreached(found, ["a"], 8) == 0
    found.counts["a"][8:] = 0
    assert unreached(found, ["a"], 8) == pytest.approx(2 / 3)


SITE = Site("a", "bidirectional", 3, 3, 4)


@pytest.mark.parametrize(
    ("sites", "change", "said"),
    [
        ([SITE, replace(SITE, name="b")], {}, "no map of b, which has 3 heads of kind bidirectional"),
        ([replace(SITE, name="b")], {}, "of a, which the model has not"),
        ([replace(SITE, heads=4)], {}, "a encoder map of 3 heads of a, which has 4 heads"),
        ([SITE], {"counts": {"a": np.ones((20, 19))}}, "pairs counted"),
        ([SITE], {"memory": 4}, "of a memory of 4 positions, the model has 0"),
    ],
)
def test_maps_of_another_model_are_refused(sites: list[Site], change: dict[str, Any], said: str) -> None:
    found = replace(maps(), **change)
    with pytest.raises(InputError, match=said):
        found.check(sites, memory=0)
    maps().check([SITE], memory=0)


def test_what_no_example_reaches_is_not_counted_and_stays() -> None:
    found = maps(heads=1, length=4)
    found.counts["a"][:, 3] = 0
    found.counts["a"][3] = 0
    mask = build_masks(found, plan(heads=1, kept=(0,)), {"bidirectional": 1 / 3}, 1)["a"]
    assert mask.kept[0, 3].all()
    assert mask.kept[0, :, 3].all()
    assert int(mask.kept[0, :3, :3].sum()) == 6


def test_counting_the_future_makes_a_small_share_nothing() -> None:
    """As the paper's own code does: the zeros above the diagonal are the first to go."""
    found = maps("causal", heads=1, length=8)
    found.maps["a"][0] *= np.tril(np.ones((8, 8)))
    alone = plan("causal", heads=1, kept=(0,))
    assert int(build_masks(found, alone, {"causal": 0.2}, 1, count_causal_zeros=True)["a"].kept.sum()) == 36
    assert int(build_masks(found, alone, {"causal": 0.2}, 1)["a"].kept.sum()) == 36 - round(0.2 * 36)


@given(st.integers(0, 20), st.integers(1, 12), st.integers(0, 13), st.sampled_from([1, 8]))
@settings(max_examples=30, deadline=None)
def test_positions_align_by_what_comes_before(past: int, queries: int, memory: int, block: int) -> None:
    draw = np.random.default_rng(0)
    mask = BlockMask(draw.random((2, -(-33 // block), -(-46 // block))) < 0.5, block, memory=13)
    found = mask.entries(queries, memory + 20, past=past, memory=memory)
    for row, column in [(0, 0), (queries - 1, memory + 19)]:
        position = column - memory
        assert (found[:, row, column] == mask.kept[:, (past + row) // block, (position + 13) // block]).all()


def test_maps_and_masks_are_read_as_they_were_written(tmp_path: Path) -> None:
    found = maps("causal", memory=8)
    found.save(tmp_path / "maps.safetensors")
    back = AttentionMaps.load(tmp_path / "maps.safetensors")
    assert (back.maps["a"] == found.maps["a"]).all()
    assert (back.counts["a"] == found.counts["a"]).all()
    assert (back.kinds, back.memory, back.model, back.data) == (found.kinds, 8, "sha256:m", "sha256:d")
    masked = plan("causal").masked(build_masks(found, plan("causal"), {"causal": 0.5}, 8))
    masked.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == masked
    (tmp_path / "plan.safetensors").unlink()
    with pytest.raises(PlanError, match="there is no such file, and the plan's masks lie in it"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockMask(np.ones((1, 2, 2), np.bool_), 12), "blocks of 12 positions; give 1 for single entries, or"),
        (lambda: BlockMask(np.ones((2, 2), np.bool_)), "shape \\[2, 2\\]; give bool \\[head, query block"),
        (lambda: BlockMask(np.ones((1, 2, 2), np.bool_), 8, -1), "a memory of -1 positions"),
        (lambda: plan().masked({"b": BlockMask(np.ones((3, 2, 2), np.bool_))}), "a mask for b, which is no site"),
        (lambda: plan().masked({"a": BlockMask(np.ones((4, 2, 2), np.bool_))}), "a mask for 4 heads, the site has 3"),
        (lambda: AttentionMaps.load("nowhere"), "there are no such maps"),
    ],
)
def test_refuses_masks_that_do_not_fit(make: object, message: str) -> None:
    with pytest.raises((ValueError, PlanError, InputError), match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("share", [-0.5, 1.5, float("nan")])
def test_refuses_a_share_that_is_none(share: float) -> None:
    with pytest.raises(ValueError, match="give 0 to 1"):
        build_masks(maps(), plan(), {"bidirectional": share}, 8)


def test_of_no_sites_every_block_is_reached() -> None:
    assert unreached(maps(), (), 8) == 0.0
