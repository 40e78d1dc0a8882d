"""Attention maps on disk, cropped, and compared with the sites of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from compressor.block_masks import AttentionMaps, build_masks
from compressor.errors import ErrorCode
from compressor.units import Site
from graph_passes import BlockMask, Plan, PlanError
from tests.block_masks.maps import plan_of, random_maps
from tests.faults import fails_with

SITE = Site("a", "bidirectional", 3, 3, 4)


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
