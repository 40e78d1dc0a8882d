"""Average maps: over the rows that have both positions, with a memory, and in segments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compressor.block_masks.attention_maps import collect_attention_maps
from compressor.errors import ErrorCode
from compressor.model_folder import example_inputs, fingerprint
from compressor.units import find_sites, hooked, keep_all, keep_only
from compressor.units.hook import Call
from tests import language
from tests.faults import fails_with
from tests.selection import tiny


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
            model(**data.task.collate([row]))
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
