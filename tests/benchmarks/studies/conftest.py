"""A model with rows of two domains, and a finished study of each kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.studies.run import study
from tests import folders
from tests.benchmarks.studies.requests import AXES, request_of


@pytest.fixture(scope="session", autouse=True)
def _exports(shared_exports: None) -> None:
    """Runs share exports."""


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with four heads, and rows of two domains that it can learn."""
    folder = tmp_path_factory.mktemp("study")
    torch.manual_seed(0)
    sizes = {**folders.SIZES, "num_hidden_layers": 2, "num_attention_heads": 4}
    folders.save(BertForSequenceClassification(BertConfig(**sizes)), folder / "model")
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    rows = [
        f"{n % 2}\t{'a$b' if n % 3 else '<i>&amp;'}\tthe {('bad', 'good')[n % 2]} film {words[n % 7]} {words[n % 5]}"
        for n in range(64)
    ]
    (folder / "rows.tsv").write_text("\n".join(["label\tdomain\ttext", *rows, ""]))
    return folder


@pytest.fixture(scope="session")
def finished(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a study of each kind, which runs at its first use."""
    out = tmp_path_factory.mktemp("done")

    @functools.cache
    def folder(kind: str) -> Path:
        axes = AXES.get(kind)
        if kind == "speed":
            study("grid", request_of(inputs, out / "small", axes={"methods": ("ste",), "keeps": (4,)}))
            axes = {"keeps": (4,), "grids": (str(out / "small"),)}
        study(kind, request_of(inputs, out / kind, axes=axes))
        return out / kind

    return folder
