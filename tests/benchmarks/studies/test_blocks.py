"""Studies of blocks: kinds that lose blocks together, other data sets, and texts that a model reads with a memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from benchmarks.studies.blocks import Blocks
from benchmarks.studies.context import StudyContext, limit_rows
from benchmarks.studies.request import SIZES, StudyRequest
from benchmarks.studies.run import study
from compressor.block_masks.attention_maps import AttentionMaps
from compressor.config.run import Recipe
from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import example_inputs
from compressor.models.forwards import reader
from compressor.tasks.causal_lm import read
from compressor.tasks.scoring import forward_of, statistics
from compressor.units import Site, find_sites, keep_all
from tests import folders, language
from tests.faults import fails_with


def blocks_study(**axes: tuple[Any, ...]) -> Blocks:
    """A study of a model with one site of each kind."""
    kinds: tuple[Any, ...] = ("bidirectional", "causal", "cross")
    context = SimpleNamespace(sites=[Site(kind, kind, 2, 2, 4) for kind in kinds])
    recipe = Recipe(model=Path("m"), data="d", keep="100%")
    return Blocks(StudyRequest(recipe, SIZES["tiny"], ("d",), {"seeds": (1,), **axes}), context, None)  # type: ignore[arg-type]


def test_kinds_of_attention_lose_blocks_together() -> None:
    instance = blocks_study(kinds=("bidirectional+causal",), shares=(0.4,), masks=("own",))
    assert [cell.name for cell in instance.cells()] == ["dense-s1", "own-bidirectional+causal-p0.4-s1"]
    step = instance.step_for("bidirectional+causal", 0.4)
    assert (step.share, step.share_by_kind) == (0.0, {"bidirectional": 0.4, "causal": 0.4})
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="kinds", value="middle"):
        blocks_study(kinds=("bidirectional+middle",)).cells()


def test_a_share_of_zero_is_one_run_without_masks() -> None:
    names = [cell.name for cell in blocks_study(shares=(0.0, 0.5), kinds=("all", "cross")).cells()]
    assert names.count("retrained-s1") == 1
    assert len(names) == 2 + 4


def test_a_study_crosses_data_sets_of_any_labels(tmp_path: Path) -> None:
    """Only the texts of the second are read; the model keeps the labels of the first."""
    torch.manual_seed(0)
    folders.save(folders.bert(), tmp_path / "model")
    rows = [f"{n % 2}\tthe {'good' if n % 2 else 'bad'} film" for n in range(40)]
    (tmp_path / "rows.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    (tmp_path / "other.tsv").write_text("\n".join(["label\tsentence1\tsentence2", *["x\tone two\tthree"] * 4, ""]))
    sources = (str(tmp_path / "rows.tsv"), str(tmp_path / "other.tsv"))
    recipe = Recipe(
        model=tmp_path / "model",
        data=sources[0],
        out=tmp_path / "out",
        keep="100%",
        training_steps=1,
        batch_size=8,
        max_length=16,
        block_size=8,
    )
    axes = {"shares": (0.0, 0.5), "masks": ("own",), "seeds": (1,)}
    findings = study("blocks", StudyRequest(recipe, replace(SIZES["tiny"], evaluations=1), sources, axes))
    assert [row["masks"] for row in findings.rows] == ["dense", "retrained", "own", "other.tsv"]
    first, crossed = findings.tables
    assert first.title.endswith("test minus retrained")
    assert crossed.columns == ("masks from", "p = 0.5")
    assert [row[0] for row in crossed.rows] == ["rows.tsv", "other.tsv"]
    assert "crossed_all" in {picture.name for picture in findings.pictures}
    maps = AttentionMaps.load(tmp_path / "out" / "kept" / "maps-other.tsv-s1.safetensors")
    assert maps.counts[next(iter(maps.counts))].max() == 4


def test_a_study_reads_a_text_with_its_memory(tmp_path: Path) -> None:
    untrained = language.folder(**language.UNDROPPED)
    data = language.data(tmp_path, untrained)
    context = StudyContext.__new__(StudyContext)
    context.folder, context.rows = untrained, data
    context.recipe = Recipe(model=tmp_path, data="d", keep="100%", batch_size=2)
    plan = keep_all(find_sites(untrained.model, example_inputs(untrained, 2, 6)))
    answers = context.answers(plan, data.test)
    np.testing.assert_allclose(answers, read(data.task, data.test, reader(untrained.model), 2), rtol=1e-5)

    without_memory = statistics(data.task, data.test, forward_of(data.task, untrained.model))
    assert not np.allclose(answers, without_memory, rtol=1e-4)


def test_rows_that_belong_together_are_not_drawn_apart() -> None:
    rows = Dataset.from_dict({"query": [0, 0, 1], "length": [1, 1, 1]})
    task = SimpleNamespace(set_aside_by="query", in_order=False)
    data: Any = SimpleNamespace(task=task, train=rows, eval=rows, test=rows)
    assert limit_rows(data, replace(SIZES["tiny"], train=2, eval=1, test=2), seed=0) is data


def test_rows_that_follow_each_other_are_limited_to_the_first(tmp_path: Path) -> None:
    untrained = language.folder(**language.UNDROPPED)
    data = language.data(tmp_path, untrained)
    limited = limit_rows(data, replace(SIZES["tiny"], train=5, eval=3, test=3), seed=0)
    assert limited.train["input_ids"] == data.train["input_ids"][:5]
