"""Watching maps, alone and together, and learning with masks: memories, interruptions, other data sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from compressor.block_masks import AttentionMaps, build_masks, collect_attention_maps
from compressor.block_masks.train_masked import learn_blocks
from compressor.config.run import Recipe
from compressor.config.study import StudyRequest
from compressor.errors import InputError
from compressor.model_folder import example_inputs, fingerprint
from compressor.progress import ProgressCallback
from compressor.studies import SIZES
from compressor.studies.blocks import Blocks
from compressor.studies.context import StudyContext, _limited
from compressor.tasks.scoring import statistics
from compressor.tasks.segment_streams import read, reader
from compressor.training.checkpoints import digest
from compressor.units import Site, find_sites, keep_all
from graph_passes import BlockMask, Plan
from tests import language, learning
from tests.launch import launch
from tests.watching import found, told


def ignore(done: int, total: int) -> None: ...


@dataclass(frozen=True)
class Asks(learning.Recipe):
    """What `learn_blocks` reads of a recipe."""

    blocks: float | None = 0.5
    prune: Mapping[Any, float] = ()  # type: ignore[assignment]
    block_size: int = 1
    maps: Path | None = None
    watch_rows: int = 20
    random_blocks: bool = False
    count_causal_zeros: bool = False
    weigh_by_rows: bool = False
    empty_rows: bool = False
    entmax: bool = False
    max_length: int = 9


def all_of_them(plan: Plan, masks: Mapping[str, BlockMask]) -> tuple[Mapping[str, BlockMask], tuple[str, ...]]:
    return masks, ()


all_of_them.timed = {}  # type: ignore[attr-defined]


def learned(
    store: Path,
    recipe: Asks,
    tell: ProgressCallback = ignore,
    seed: int = 0,
    start: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Plan, str, tuple[str, ...]]:
    model = learning.model(seed)
    sites = learning.sites(model)
    plan = keep_all(sites)
    masked = learn_blocks(model, sites, learning.data(), recipe, plan, store, all_of_them, tell, start=start)  # type: ignore[arg-type]
    return masked.plan, digest(model), masked.notes


@pytest.mark.parametrize("entmax", [False, True])
def test_an_interrupted_run_ends_as_one_that_was_not(entmax: bool, tmp_path: Path) -> None:
    """Stopped while it learned with masks; and where maps are of a model that learns with entmax first, in that."""
    recipe = Asks(prune={}, steps=6, options={"evaluations": 3}, entmax=entmax)

    def stop(done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learned(tmp_path / "stopped", recipe, stop)
    stages = [path.name for path in (tmp_path / "stopped").iterdir() if path.is_dir()]
    assert stages == (["entmax"] if entmax else ["checkpoints"])
    kept = tmp_path / "stopped" / "maps.safetensors"
    before = None if entmax else kept.stat().st_mtime_ns
    assert learned(tmp_path / "stopped", recipe) == learned(tmp_path / "whole", recipe)
    assert before in (None, kept.stat().st_mtime_ns)
    assert not (tmp_path / "stopped" / "entmax").exists()


def test_entmax_is_for_the_maps_and_leaves_the_weights_to_softmax(tmp_path: Path) -> None:
    """What learns with masks begins at the weights of the model, not at those that learned with entmax."""
    plain, sharp = (Asks(prune={}, steps=2, entmax=entmax, learning_rate=1e-9) for entmax in (False, True))
    begun = digest(learning.model())
    for name, recipe in (("plain", plain), ("sharp", sharp)):
        _, after, _ = learned(tmp_path / name, replace(recipe, blocks=0.0))
        assert after == begun
    one, other = (AttentionMaps.load(tmp_path / name / "maps.safetensors").maps for name in ("plain", "sharp"))
    assert all(np.abs(other[site] - one[site]).max() > 1e-4 for site in one)


def test_restart_learns_with_the_masks_from_other_weights(tmp_path: Path) -> None:
    """Heads may have been learned since: the masks are of the model as it is, what learns is the model as it was."""
    first = learning.model(1)
    sites = learning.sites(first)
    collect_attention_maps(first, sites, learning.data(), keep_all(sites), length=9).save(tmp_path / "maps.safetensors")
    recipe = Asks(prune={}, steps=2, maps=tmp_path / "maps.safetensors")
    again = learned(tmp_path / "again", recipe, seed=0, start=learning.model(1).state_dict())
    assert again[:2] == learned(tmp_path / "alone", recipe, seed=1)[:2]
    assert again[1] != learned(tmp_path / "on", recipe, seed=0)[1]


@pytest.mark.parametrize("flag", ["random_blocks", "count_causal_zeros", "weigh_by_rows", "empty_rows"])
def test_flags_of_cutting_reach_it(flag: str, tmp_path: Path) -> None:
    recipe = Asks(prune={}, steps=1, seed=7)
    plan, _, _ = learned(tmp_path / "store", replace(recipe, **{flag: True}))  # type: ignore[arg-type]
    maps = AttentionMaps.load(tmp_path / "store" / "maps.safetensors")
    given = {"seed": 7} if flag == "random_blocks" else {flag: True}
    whole = plan.masked({})
    wanted = build_masks(maps, whole, {"bidirectional": 0.5}, 1, **given)
    assert plan.masks.keys() == wanted.keys()
    for name, mask in wanted.items():
        np.testing.assert_array_equal(plan.masks[name].kept, mask.kept)


def test_maps_of_an_earlier_run_are_cropped_kept_and_told_of(tmp_path: Path) -> None:
    model, data = learning.model(1), learning.data()
    sites = learning.sites(model)
    long = collect_attention_maps(model, sites, data, keep_all(sites), length=14)
    assert long.model == fingerprint(model)
    long.save(tmp_path / "maps.safetensors")
    recipe = Asks(prune={}, steps=1, maps=tmp_path / "maps.safetensors", max_length=12)
    plan, _, notes = learned(tmp_path / "store", recipe)
    assert {mask.queries for mask in plan.masks.values()} == {12}
    assert notes[0].startswith("masks are cut from the maps of other weights (")
    assert notes[1] == "the maps reach over 14 positions, rows over 12: the first 12 count"
    assert "of the blocks are reached by no row that was watched" in notes[2]
    kept = AttentionMaps.load(tmp_path / "store" / "maps.safetensors")
    assert kept.length == 14
    with pytest.raises(InputError, match="the maps reach over 14 positions, rows have up to 15"):
        learned(tmp_path / "other", replace(recipe, max_length=15))


def test_a_memory_has_columns_of_its_own(tmp_path: Path) -> None:
    """In one stream the first segment remembers nothing, the second six positions, the others eight."""
    held = language.folder(**language.UNDROPPED)
    data = language.data(tmp_path, held)
    sites = find_sites(held.model, example_inputs(held, 2, 6))
    maps = collect_attention_maps(held.model, sites, data, keep_all(sites), length=6, batch_size=1, rows=5)
    for name, counts in maps.counts.items():
        assert counts[0].tolist() == [3, 3, 4, 4, 4, 4, 4, 4, *[5] * 6]
        future = maps.maps[name][:, np.triu(np.ones((6, 6), np.bool_), 1).nonzero()[0], :]
        assert np.isfinite(future).all()
        assert not maps.maps[name][:, 0, 9:].any()


def test_a_study_reads_a_text_with_its_memory(tmp_path: Path) -> None:
    held = language.folder(**language.UNDROPPED)
    data = language.data(tmp_path, held)
    subject = StudyContext.__new__(StudyContext)
    subject.folder, subject.given = held, data
    subject.recipe = Recipe(model=tmp_path, data="d", keep="100%", batch_size=2)
    plan = keep_all(find_sites(held.model, example_inputs(held, 2, 6)))
    answers = subject.answers(plan, data.test)
    np.testing.assert_allclose(answers, read(data.task, data.test, reader(held.model), 2), rtol=1e-5)  # type: ignore[arg-type]

    def alone(batch: dict[str, torch.Tensor]) -> np.ndarray:
        with torch.no_grad():
            return data.task.logits(held.model(**batch))

    assert not np.allclose(answers, statistics(data.task, data.test, alone), rtol=1e-4)


def test_rows_that_follow_each_other_are_limited_to_the_first(tmp_path: Path) -> None:
    held = language.folder(**language.UNDROPPED)
    data = language.data(tmp_path, held)
    few = _limited(data, replace(SIZES["tiny"], train=5, eval=3, test=3), seed=0)
    assert few.train["input_ids"] == data.train["input_ids"][:5]


def test_processes_watch_together_what_one_watches_alone(tmp_path: Path) -> None:
    """Also where there is a row less than there are processes."""
    ranks = launch("tests.watching", tmp_path)
    alone = told(found(tmp_path))
    assert ranks[0] == ranks[1]
    for name, sites in alone.items():
        for site, (maps, counts) in sites.items():
            np.testing.assert_allclose(ranks[0][name][site][0], maps, atol=1e-6)
            assert ranks[0][name][site][1] == counts


def _study(**axes: tuple[Any, ...]) -> Blocks:
    kinds: tuple[Any, ...] = ("bidirectional", "causal", "cross")
    subject = SimpleNamespace(sites=[Site(kind, kind, 2, 2, 4) for kind in kinds])
    recipe = Recipe(model=Path("m"), data="d", keep="100%")
    return Blocks(StudyRequest(recipe, SIZES["tiny"], ("d",), {"seeds": (1,), **axes}), subject, None)  # type: ignore[arg-type]


def test_kinds_of_attention_are_pruned_together() -> None:
    study = _study(kinds=("bidirectional+causal",), shares=(0.4,), masks=("own",))
    assert [cell.name for cell in study.cells()] == ["dense-s1", "own-bidirectional+causal-p0.4-s1"]
    asked = study._asked("bidirectional+causal", 0.4)
    assert (asked.blocks, asked.prune) == (None, {"bidirectional": 0.4, "causal": 0.4})
    with pytest.raises(Exception, match=r"--kinds encoder\+middle: the model has no middle attention"):
        _study(kinds=("bidirectional+middle",)).cells()


def test_the_share_zero_is_one_run_without_masks() -> None:
    study = _study(shares=(0.0, 0.5), kinds=("all", "cross"))
    names = [cell.name for cell in study.cells()]
    assert names.count("retrained-s1") == 1
    assert len(names) == 2 + 4
