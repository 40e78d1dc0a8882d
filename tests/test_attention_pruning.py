"""Attention pruning from rows to an engine: average maps, what the planner chooses, and a run with masks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import compressor
from compressor.block_masks import AttentionMaps, collect_attention_maps
from compressor.block_masks import attention_timer as clock_of_sites
from compressor.block_masks.attention_timer import AttentionExtras, SiteTimes, find_attention_extras
from compressor.block_masks.mask_selector import MaskSelector
from compressor.config.run import Recipe, make
from compressor.config.study import StudyRequest
from compressor.errors import InputError, UsageError
from compressor.model_folder import example_inputs, load
from compressor.run.rebuild import rebuild
from compressor.studies import SIZES, study
from compressor.targets.base import Feeds
from compressor.targets.onnxruntime import ort_session as sessions
from compressor.targets.onnxruntime.target import build
from compressor.tasks import open_data
from compressor.units import find_sites, hooked, keep_all
from compressor.workdir import write_json
from graph_passes import BlockMask, Kind, Plan, SitePlan
from tests import folders
from tests.test_pipeline import Stages
from tests.zoo import FAMILIES, PERSISTENT


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and rows of 4 to 16 tokens."""
    folder = tmp_path_factory.mktemp("attention-pruning")
    torch.manual_seed(0)
    folders.save(folders.bert(), folder / "model")
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    rows = [f"{n % 2}\tthe {'good' if n % 2 else 'bad'} {' '.join(words[: n % 13])}" for n in range(40)]
    (folder / "rows.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    return folder


def recipe(place: Path, out: Path, **more: object) -> Recipe:
    settings = {"steps": 2, "batch_size": 8, "max_length": 16, "batch": (1,), "seq": (16,), "seconds": 0.01}
    settings |= {"data": str(place / "rows.tsv"), "blocks": 0.5, "block_size": 8, "everywhere": True}
    return Recipe.model_validate({"model": place / "model", "out": out, **settings, **more})


@pytest.mark.parametrize("batch_size", [1, 7])
def test_maps_are_averages_over_the_rows_that_have_both_positions(batch_size: int, place: Path, tmp_path: Path) -> None:
    folder = load(place / "model")
    data = open_data(recipe(place, tmp_path / "out"), folder)
    inputs = data.task.collate([data.train[0]])
    sites = find_sites(folder.model, {name: value for name, value in inputs.items() if name != "labels"})
    maps = collect_attention_maps(folder.model, sites, data, keep_all(sites), length=16, batch_size=batch_size)
    site = sites[0]
    total, count = np.zeros((site.heads, 16, 16)), np.zeros((16, 16))
    for row in data.train:
        seen = list[torch.Tensor]()

        def see(name: str, found: torch.Tensor, seen: list[torch.Tensor] = seen) -> None:
            seen.append(found)

        with torch.no_grad(), hooked(folder.model.eval(), lambda name, out: out, attention="eager", on_weights=see):
            folder.model(**data.task.collate([row]))
        long = seen[0].shape[2]
        total[:, :long, :long] += seen[0][0].numpy()
        count[:long, :long] += 1
    assert (maps.counts[site.name] == count).all()
    assert np.allclose(maps.maps[site.name], total / np.maximum(count, 1), atol=1e-6)
    few = collect_attention_maps(folder.model, sites, data, keep_all(sites), length=16, batch_size=batch_size, rows=5)
    assert few.counts[site.name][0, 0] == 5
    with pytest.raises(InputError, match="the maps reach over 8; raise --max-length"):
        collect_attention_maps(folder.model, sites, data, keep_all(sites), length=8)


def test_a_run_with_heads_and_blocks(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    heard = Stages()
    asked = recipe(place, out, keep=1, method="taylor", options={"rows": 8}, seq=None)
    report = compressor.compress(asked, heard)
    assert all(proof.holds for proof in report.proofs)
    assert any("length 16" in case for proof in report.proofs for case in proof.cases)
    plan = Plan.load(out / "plan.json")
    (site,) = plan.sites
    (told,) = report.blocks
    assert (out / "plan.safetensors").is_file()
    assert told.form in ("masked", "block-sparse")
    assert told.share == plan.masks[site.name].kept[list(site.kept)].mean()
    assert set(told.milliseconds[max(told.milliseconds)]) == {"whole", "masked", "block-sparse"}
    assert "learning which heads to keep (taylor) and which blocks to drop" in heard.seen
    assert "of the blocks of 1 of 1 attention layers kept" in report.verdict
    assert (out / "maps.safetensors").is_file()
    again = compressor.compress(Recipe(model=out, out=tmp_path / "again", batch=(1,), seq=(8,), seconds=0.01), heard)
    assert again.plan.sites == plan.sites
    assert all(proof.holds for proof in again.proofs)
    assert any("their beginning counts" in note for note in again.notes)
    engine = build(out / "model.onnx", tmp_path / "engine.onnx", threads=1)
    with pytest.raises(InputError, match="input_ids: 17 positions, the masks reach over 16; give shorter rows"):
        engine.run({"input_ids": np.ones((1, 17), np.int64), "attention_mask": np.ones((1, 17), np.int64)})
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(InputError, match="cannot run at batch 1, length 17"):
        rebuild(out, {"seq": (17,)}, heard)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert not rebuild(out, {}, heard).speeds
    notes = rebuild(out, {}, heard).notes
    assert len(notes) == len(set(notes))
    assert "what the run measured and this build could not is kept in run-report.html and run-report.json" in notes
    for end in ("json", "html"):  # what cannot be measured again is still there
        assert (out / f"run-report.{end}").read_bytes() == before[out / f"report.{end}"]


def test_a_head_that_lost_every_block_counts_as_dropped(place: Path, tmp_path: Path) -> None:
    folder = load(place / "model")
    plan = keep_all(find_sites(folder.model, example_inputs(folder, 2, 8)))
    (site,) = plan.sites
    kept = np.ones((site.heads, 2, 2), np.bool_)
    kept[1] = False
    plan.masked({site.name: BlockMask(kept, 8)}).save(tmp_path / "plan.json")
    given = {"model": place / "model", "plan": tmp_path / "plan.json", "out": tmp_path / "out"}
    report = compressor.compress(Recipe.model_validate({**given, "batch": (1,), "seq": (16,), "seconds": 0.01}))
    assert report.plan.heads_kept == site.heads - 1
    assert Plan.load(tmp_path / "out" / "plan.json").sites[0].dropped == (1,)
    assert f"{site.heads - 1} of {site.heads} heads kept" in report.verdict
    assert f"heads that lost every block are dropped like any other: {site.name} 1" in report.notes


class Told(MaskSelector):
    """A planner whose clock is a table: site -> whole over block-sparse at each length."""

    def __init__(self, gains: Mapping[str, tuple[float, ...]], **more: object) -> None:
        super().__init__(Recipe.model_validate({"model": "m", "data": "d", "blocks": 0.5, **more}), ())
        for name, each in gains.items():
            pairs = zip((8, 16), each, strict=True)
            self._times[name] = tuple(
                SiteTimes(length, {"whole": gain, "masked": 2.0, "block-sparse": 1.0}) for length, gain in pairs
            )


def _masks() -> tuple[Plan, dict[str, BlockMask]]:
    model, inputs = FAMILIES["bert"](0)
    plan = keep_all(find_sites(model, inputs))
    return plan, {site.name: BlockMask(np.ones((4, 2, 2), np.bool_), 8) for site in plan.sites}


def test_the_planner_masks_where_it_pays_at_the_longest_length_and_costs_nothing_at_any() -> None:
    plan, masks = _masks()
    first, second, third = (site.name for site in plan.sites)
    gains = {first: (1.0, 1.1), second: (1.0, 1.09), third: (0.99, 5.0)}
    chosen, notes = Told(gains)(plan, masks)
    assert list(chosen) == [first]
    assert "2 of 3 sites keep every block" in notes[0]
    assert f"{second} (1.09 times as fast at length 16), {third} (0.99 times as fast at length 8)" in notes[0]
    for more in ({"everywhere": True}, {"block_size": 1}):
        assert Told(gains, **more)(plan, masks) == (masks, ())


def test_a_mask_that_was_learned_with_takes_its_faster_form() -> None:
    plan, masks = _masks()
    first, second, third = (site.name for site in plan.sites)
    told = Told({first: (1.0, 1.0), second: (1.0, 1.0)})
    told._times[second] = (SiteTimes(16, {"whole": 1.0, "masked": 0.5, "block-sparse": 1.0}),)
    told._times[third] = (SiteTimes(16, {"whole": 1.0, "masked": 0.5}),)
    masked = plan.masked(masks)
    assert told.lowered(masked) == {first}
    forms = [site.form for site in told.told(masked, (), {first}, {})]
    assert forms == ["block-sparse", "masked", "masked"]
    assert [site.form for site in told.told(plan, {first}, (), {})] == ["whole"]


def test_shorter_rows_than_the_longest_are_timed_whatever_is_asked_for() -> None:
    asked = Recipe.model_validate({"model": "m", "data": "d", "blocks": 0.5})
    assert MaskSelector(asked, (), 100).lengths == (50, 75, 100)
    assert MaskSelector(asked, (128,), 100).lengths == (50, 75, 100, 128)


@pytest.mark.parametrize("what", [AttentionExtras(), AttentionExtras(bias=2), AttentionExtras(persistent=3, bias=2)])
@pytest.mark.parametrize(("kind", "memory"), [("bidirectional", 0), ("causal", 0), ("causal", 8), ("cross", 0)])
def test_the_forms_that_are_timed_read_what_the_site_reads(kind: Kind, memory: int, what: AttentionExtras) -> None:
    """Of a mask that keeps every block all forms are the same attention."""
    site = SitePlan("a", kind, 2, 1, 4, (0, 1))
    mask = BlockMask(np.ones((2, 2, 2 + memory // 8), np.bool_), 8, memory)
    seen: list[dict[str, np.ndarray]] = []

    def run(opened: Mapping[str, Any], feeds: Feeds) -> dict[str, float]:
        seen.append(
            {form: sessions.run(session, feeds)["output"].reshape(3, -1, 8) for form, session in opened.items()}
        )
        return dict.fromkeys(opened, 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock_of_sites, "_medians", run)
        asked = Recipe.model_validate({"model": "m", "data": "d", "blocks": 0.5, "batch": 3, "threads": 1})
        times = MaskSelector(asked, (), 11, {"a": what}).times(site, mask)
    assert {(time.length, time.batch) for time in times} == {(6, 3), (8, 3), (11, 3)}
    forms = seen[-1]
    assert set(forms) == {"whole", "masked", "block-sparse"}
    for form in forms.values():
        np.testing.assert_allclose(form, forms["whole"], atol=1e-5)


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("bert", {AttentionExtras()}),
        ("gpt2", {AttentionExtras()}),
        ("all_attention", {AttentionExtras(PERSISTENT, 4)}),
        ("t5", {AttentionExtras(bias=4), AttentionExtras()}),  # between decoder and encoder there is no bias
    ],
)
def test_what_a_site_reads_beside_positions_is_seen(family: str, found: set[AttentionExtras]) -> None:
    model, inputs = FAMILIES[family](0)
    assert set(find_attention_extras(model, inputs).values()) == found


def test_the_maps_of_a_recipe_file_lie_beside_it(place: Path, tmp_path: Path) -> None:
    lines = {"model": "model", "data": "rows", "blocks": 0.5, "maps": "maps.safetensors", "timing_cache": "cache"}
    (tmp_path / "compress.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items()))
    found = make(None, str(tmp_path / "compress.toml"), {})
    assert (found.maps, found.timing_cache) == (tmp_path / "maps.safetensors", tmp_path / "cache")


def test_times_outlive_an_interruption(tmp_path: Path) -> None:
    plan, masks = _masks()
    site = plan.sites[0]
    first = Told({site.name: (1.0, 1.0)})
    write_json(tmp_path / "planned.json", {"notes": [], "times": first.timed})
    again = Told({})
    again.recall(tmp_path / "planned.json")
    assert again.times(site, masks[site.name]) == first.times(site, masks[site.name])


def test_a_study_crosses_data_sets_of_any_labels(place: Path, tmp_path: Path) -> None:
    """Only the texts of the second are watched; the model keeps the labels of the first."""
    (tmp_path / "other.tsv").write_text("\n".join(["label\tsentence1\tsentence2", *["x\tone two\tthree"] * 4, ""]))
    sources = (str(place / "rows.tsv"), str(tmp_path / "other.tsv"))
    asked = recipe(place, tmp_path / "out", blocks=None, block_size=8, steps=1, keep="100%")
    axes = {"shares": (0.0, 0.5), "masks": ("own",), "seeds": (1,)}
    size = replace(SIZES["tiny"], evaluations=1)
    found = study("blocks", StudyRequest(asked, size, sources, axes))
    assert [row["masks"] for row in found.rows] == ["dense", "retrained", "own", "other.tsv"]
    first, crossed = found.tables
    assert first.title.endswith("test minus retrained")
    assert crossed.columns == ("masks from", "p = 0.5")
    assert [row[0] for row in crossed.rows] == ["rows.tsv", "other.tsv"]
    assert "crossed_all" in {picture.name for picture in found.pictures}
    maps = AttentionMaps.load(tmp_path / "out" / "kept" / "maps-other.tsv-s1.safetensors")
    assert maps.counts[next(iter(maps.counts))].max() == 4


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"blocks": 1.5}, "--blocks 1.5"),
        ({"blocks": 0.5, "block_size": 12}, "give a multiple of 8 such as 64, or 1 for single entries"),
        ({"prune": "middle=0.5"}, "--prune"),
        ({"prune": "bidirectional=2"}, "--prune"),
        ({"blocks": 0.5, "data": None}, "there are no rows to watch and to learn from; give them"),
    ],
)
def test_refuses_shares_and_sizes_out_of_range(flags: dict[str, object], said: str, place: Path) -> None:
    asked = {"data": str(place / "rows.tsv"), **flags}
    with pytest.raises(UsageError) as refused:
        make(str(place / "model"), None, {name: value for name, value in asked.items() if value is not None})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"prune": {"cross": 0.5}}, UsageError, "--prune cross: the model has no such attention; it has encoder"),
        ({"seq": (18,)}, UsageError, "--seq 18: the masks reach over 16 positions"),
        ({"maps": "nowhere.safetensors"}, InputError, "there are no such maps"),
        ({"maps": "short.safetensors"}, InputError, "the maps reach over 8 positions, rows have up to 16; lower"),
    ],
)
def test_refuses_what_does_not_fit_the_model_before_anything_is_built(
    more: dict[str, object], error: type[Exception], said: str, place: Path, tmp_path: Path
) -> None:
    heard = Stages()
    if "maps" in more:
        more = {"maps": tmp_path / str(more["maps"])}
        folder = load(place / "model")
        (site,) = find_sites(folder.model, example_inputs(folder, 2, 8))
        maps, counts = np.zeros((site.heads, 8, 8), np.float32), np.ones((8, 8), np.float32)
        short = AttentionMaps({site.name: maps}, {site.name: counts}, {site.name: site.kind}, 0, None, None)
        short.save(tmp_path / "short.safetensors")
    with pytest.raises(error, match=said):
        compressor.compress(recipe(place, tmp_path / "out", **more), heard)
    assert not any("exporting" in stage for stage in heard.seen)
    assert not (tmp_path / "out").exists()
