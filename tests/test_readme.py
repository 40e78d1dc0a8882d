"""The README's Python runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.export import export_reference
from compressor.folder import example_inputs
from compressor.folder import load as load_folder
from compressor.sites import find_sites, keep_all
from graph_passes import find_attention, load
from tests import folders
from tests.test_models import all_attention

README = Path(__file__).parent.parent / "README.md"


def test_the_python_of_the_readme_runs_as_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.save(folders.bert(), tmp_path / "model")
    rows = [f"{index % 2}\tthe {'good' if index % 2 else 'bad'} film {index % 5}" for index in range(40)]
    (tmp_path / "train.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    monkeypatch.chdir(tmp_path)
    exec(snippet("From Python"), {})
    assert (tmp_path / "out" / "report.html").is_file()
    assert [site.heads for site in find_attention(load("small.onnx"))] == [1]


def test_a_graph_with_memory_reads_on_as_the_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = all_attention(vocab_size=25, num_hidden_layers=1)
    folder = load_folder(folders.save(model, tmp_path / "lm"))
    inputs = example_inputs(folder, 2, 8)
    (tmp_path / "small").mkdir()
    export_reference(model, keep_all(find_sites(model, inputs)), inputs, tmp_path / "small" / "model.onnx")
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {}
    exec(snippet("Language models with memory"), made)
    assert len(made["stream"].memories) == 1
    torch.testing.assert_close(torch.from_numpy(made["logits"]), made["out"].logits, rtol=1e-4, atol=1e-4)


def snippet(section: str) -> str:
    """The Python of a section of the README."""
    text = README.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    (found,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(found)


def test_what_the_readme_points_at_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
