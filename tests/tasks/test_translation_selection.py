"""Selecting heads of an encoder-decoder: by the loss, in pools of one kind of attention, from rows of any length."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import compressor
from compressor.block_masks.attention_maps import collect_attention_maps
from compressor.config.methods import METHODS
from compressor.config.run import Recipe
from compressor.config.steps import Heads
from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import ModelFolder
from compressor.models.forwards import tensors_of
from compressor.results import MetricUnit, NoteCode, Report
from compressor.selection.learn import learn
from compressor.selection.subset_evaluator import sensitivity
from compressor.tasks import Data, batches, open_data, statistics
from compressor.training.checkpoints import digest
from compressor.units import Site, find_sites, keep_all
from tests.faults import fails_with
from tests.folders import rows_config
from tests.selection.tiny import HEAD_METHODS
from tests.tasks.rows import forward_of
from tests.tasks.translations import open_pairs

POOLS = {"model": 3, "bidirectional": 1, "causal": 1, "cross": 1}
"""Pool -> heads of it to keep, of six heads of the model and two of each kind."""


@pytest.fixture(scope="module")
def data(translator: ModelFolder, trained_translator: Path) -> Data:
    return open_pairs(translator, str(trained_translator / "rows.tsv"))


@pytest.fixture(scope="module")
def sites(translator: ModelFolder, data: Data) -> list[Site]:
    return find_sites(translator.model, tensors_of(data.task.collate(list(data.train.select(range(2))))))


def selection(method: str, **fields: Any) -> Heads:
    return Heads(method=method, **{"training_steps": 2, "batch_size": 4, "learning_rate": 1e-3, **fields})


def test_sensitivity_weighs_every_row_alike(translator: ModelFolder, data: Data, sites: list[Site]) -> None:
    """Rows of different lengths together give the mean over rows, whose losses need no weight."""
    rows = data.train.select(range(6))
    every_head = torch.ones(sum(site.heads for site in sites), dtype=torch.bool)
    together, single = (
        sensitivity(
            translator.model, sites, every_head, [tensors_of(batch) for _, batch in batches(data.task, rows, size)]
        )
        for size in (6, 1)
    )
    torch.testing.assert_close(together, single, rtol=1e-4, atol=1e-6)
    assert {site.kind for site in sites} == {"bidirectional", "causal", "cross"}


def test_maps_are_averages_over_the_rows_that_have_both_positions(
    translator: ModelFolder, data: Data, sites: list[Site]
) -> None:
    """Rows have several lengths on either side; padding neither adds nor dilutes."""
    data = replace(data, train=data.train.select(range(12)))
    together, single = (
        collect_attention_maps(translator.model, sites, data, keep_all(sites), length=12, batch_size=size)
        for size in (5, 1)
    )
    rows = [data.task.collate([row]) for row in data.train]
    source = np.array([row["attention_mask"].shape[1] for row in rows])
    target = np.array([row["labels"].shape[1] for row in rows])
    lengths = {"bidirectional": (source, source), "causal": (target, target), "cross": (target, source)}
    positions = np.arange(12)
    for site in sites:
        queries, keys = lengths[site.kind]
        both = (queries[:, None, None] > positions[:, None]) & (keys[:, None, None] > positions)
        np.testing.assert_array_equal(together.counts[site.name], both.sum(axis=0))
        np.testing.assert_allclose(together.maps[site.name], single.maps[site.name], atol=1e-6)


def test_a_search_selects_by_the_loss(translator: ModelFolder, data: Data, sites: list[Site], tmp_path: Path) -> None:
    before = digest(translator.model)
    learned = learn(translator.model, sites, data, selection("taylor", keep=3), tmp_path)
    assert learned.plan.heads_kept == 3
    assert "eval_loss" in learned.curves[-1].values
    assert digest(translator.model) == before


def test_a_drop_of_bleu_cannot_end_a_search(
    translator: ModelFolder, data: Data, sites: list[Site], tmp_path: Path
) -> None:
    with fails_with(ErrorCode.CONTRADICTION, UsageError, metric="bleu"):
        learn(translator.model, sites, data, selection("taylor", max_drop=1.0), tmp_path)


@pytest.mark.parametrize(
    ("method", "pool"),
    [
        pytest.param(method, pool, marks=() if method == "dsp" or pool == "cross" else pytest.mark.zoo)
        for method in HEAD_METHODS
        for pool in POOLS
    ],
)
def test_every_method_keeps_as_many_heads_of_a_pool_as_requested(
    method: str, pool: str, translator: ModelFolder, data: Data, sites: list[Site], tmp_path: Path
) -> None:
    quick: dict[str, Any] = (
        {"evaluations": 1} if METHODS[method].kind == "gate" else {"trials": 2} if method == "random" else {}
    )
    request = selection(method, keep=POOLS[pool], options={"pool": pool, **quick})
    learned = learn(copy.deepcopy(translator.model), sites, data, request, tmp_path)
    kept = {site.kind: len(site.kept) for site in learned.plan.sites}
    if pool != "model":
        assert kept == {"bidirectional": 2, "causal": 2, "cross": 2, pool: 1}
    elif method != "global":  # it removes a head of every layer at a time, and never keeps fewer than requested
        assert sum(kept.values()) == 3


# A whole run


@pytest.fixture(scope="module", params=[pytest.param(method, marks=pytest.mark.zoo) for method in ("dsp", "taylor")])
def report(
    request: pytest.FixtureRequest, trained_translator: Path, tmp_path_factory: pytest.TempPathFactory
) -> Report:
    fields: dict[str, Any] = {"options": {"pool": "kind", "evaluations": 2}} if request.param == "dsp" else {}
    return compressor.compress(
        Recipe(
            model=trained_translator / "model",
            task="translation",
            data=str(trained_translator / "rows.tsv"),
            method=request.param,
            keep="50%",
            training_steps=4,
            batch_size=8,
            max_length=10,
            batch=(1,),
            seq=(8,),
            seconds=0.01,
            threads=1,
            out=tmp_path_factory.mktemp("out") / "out",
            **fields,
        )
    )


def test_the_report_compares_bleu_on_the_engines(
    report: Report, translator: ModelFolder, trained_translator: Path
) -> None:
    (score,) = report.scores
    data = open_data(rows_config(str(trained_translator / "rows.tsv"), max_length=10), translator)
    assert score.dense == data.task.score(statistics(data.task, data.test, forward_of(translator.model)))
    assert (report.task, score.metric, score.higher_is_better) == ("translation", "bleu", True)
    assert score.unit is MetricUnit.RAW
    assert score.dense > 40
    assert report.plan.evidence["test"]["compressed"] == score.compressed
    assert report.plan.heads_kept == 3
    assert all(proof.holds for proof in report.proofs)
    assert NoteCode.METRIC_SETTINGS in {note.code for note in report.notes}
    assert any("eval_loss" in point.values for point in report.curves)
    if report.plan.method == "dsp":
        assert [len(site.kept) for site in report.plan.sites] == [1, 1, 1]
