"""Tiny model folders that the tests of a module share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compressor.model_folder import ModelFolder, load
from compressor.models.forwards import tensors_of
from tests import folders
from tests.tasks.translations import marian, open_pairs, save, sentence, tsv


@pytest.fixture(scope="session", autouse=True)
def _exports(shared_exports: None) -> None:
    """Runs share exports."""


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A BERT of two classes."""
    torch.manual_seed(0)
    return load(folders.save(folders.bert(), tmp_path_factory.mktemp("classifier")))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A BERT with one output."""
    torch.manual_seed(0)
    return load(folders.save(folders.bert(num_labels=1), tmp_path_factory.mktemp("scorer")))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A GPT-2 with a language modelling head."""
    torch.manual_seed(0)
    return load(folders.save(folders.gpt2(), tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="session")
def trained_translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows and a Marian that learned to translate them word by word; tests must not change it."""
    path = tmp_path_factory.mktemp("translation")
    rows = tsv(path / "rows.tsv", *("\t".join(sentence(seed)) for seed in range(40)))
    folder = load(save(marian(), path / "model"), task="translation")
    torch.manual_seed(0)
    folder.model.init_weights()
    data = open_pairs(folder, rows)
    batch = tensors_of(data.task.collate(list(data.train)))
    optimizer = torch.optim.Adam(folder.model.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        folder.model(**batch).loss.backward()
        optimizer.step()
    folder.model.save_pretrained(path / "model")
    return path


@pytest.fixture(scope="module")
def translator(trained_translator: Path) -> ModelFolder:
    """The trained Marian."""
    return load(trained_translator / "model", task="translation")
