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
    report = compressor.compress(learning_recipe(mixer, tmp_path / "out", keep=None, steps=None, macs="80%"))
    assert report.plan.sites == ()
    assert report.plan.neurons_kept < report.plan.neurons
    assert report.proofs
    assert all(proof.holds for proof in report.proofs)
    assert "heads" not in report.verdict


def test_a_number_of_heads_is_refused(mixer: Path, tmp_path: Path) -> None:
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, family="fnet"):
        compressor.compress(learning_recipe(mixer, tmp_path / "out", keep=1))
    assert not (tmp_path / "out").exists()


def test_the_model_as_it_is_becomes_an_engine(mixer: Path, tmp_path: Path) -> None:
    report = compressor.compress(learning_recipe(mixer, tmp_path / "out", data=None, keep=None, steps=None))
    assert report.plan.groups == ()
    assert all(proof.holds for proof in report.proofs)
