"""Runs of a model whose heads are not found: neurons are removed by a budget, and heads are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import compressor
from compressor.errors import ErrorCode, SiteRefusedError
from tests import folders
from tests.faults import fails_with
from tests.run.listeners import RecordingListener
from tests.run.runs import learning_recipe

SIZES: dict[str, Any] = {name: size for name, size in folders.SIZES.items() if name != "num_attention_heads"}


@pytest.fixture
def mixer(inputs: Path, tmp_path: Path) -> Path:
    """A folder with rows, and a model that mixes positions by Fourier transforms."""
    torch.manual_seed(0)
    folder = tmp_path / "inputs"
    folders.save(hf.FNetForSequenceClassification(hf.FNetConfig(**SIZES)), folder / "model")
    (folder / "rows.tsv").write_bytes((inputs / "rows.tsv").read_bytes())
    return folder


def test_a_budget_removes_neurons(mixer: Path, tmp_path: Path) -> None:
    report = compressor.compress(learning_recipe(mixer, tmp_path / "out", keep=None, training_steps=None, macs="80%"))
    assert report.plan.sites == ()
    assert report.plan.neurons_kept < report.plan.neurons
    assert report.proofs
    assert all(proof.holds for proof in report.proofs)
    assert "heads" not in report.verdict
    assert {share.type for share in report.costs} == {"feed-forward", "rest"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert not any(text in page for text in ("0 of 0", "every head", "one column per head"))


@pytest.mark.zoo
def test_a_plan_without_heads_is_followed(mixer: Path, tmp_path: Path) -> None:
    report = compressor.compress(learning_recipe(mixer, tmp_path / "out", keep=None, training_steps=None, macs="80%"))
    out, plan = tmp_path / "out", tmp_path / "out" / "plan.json"
    again = learning_recipe(mixer, tmp_path / "again", model=out, plan=plan, keep=None, training_steps=None)
    assert compressor.compress(again).plan.neurons_kept == report.plan.neurons_kept


@pytest.mark.zoo
def test_a_gate_removes_neurons(mixer: Path, tmp_path: Path) -> None:
    report = compressor.compress(learning_recipe(mixer, tmp_path / "out", keep=None, macs="80%", method="dsp"))
    assert report.plan.neurons_kept < report.plan.neurons
    assert all(proof.holds for proof in report.proofs)


@pytest.mark.parametrize(
    "fields", [{"keep": 1}, {"keep": None, "training_steps": None, "macs": "80%", "prune_units": "heads"}]
)
def test_heads_are_refused(mixer: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    listener = RecordingListener()
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, family="fnet"):
        compressor.compress(learning_recipe(mixer, tmp_path / "out", **fields), listener)
    assert not any("exporting" in stage for stage in listener.stages)
    assert not (tmp_path / "out").exists()


@pytest.mark.zoo
def test_the_model_as_it_is_becomes_an_engine(mixer: Path, tmp_path: Path) -> None:
    report = compressor.compress(learning_recipe(mixer, tmp_path / "out", data=None, keep=None, training_steps=None))
    assert report.plan.groups == ()
    assert all(proof.holds for proof in report.proofs)
