"""The README's Python runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressor.export import export_reference
from compressor.model_folder import example_inputs
from compressor.model_folder import load as load_folder
from compressor.targets.onnxruntime.ort_session import describe, open_session, run
from compressor.units import find_sites, keep_all
from graph_passes import find_attention, load
from tests import folders
from tests.served import IDS, serving, text_model
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


def test_the_latency_gate_runs_as_pasted(tmp_path: Path) -> None:
    out = text_model(tmp_path / "out")
    opened = open_session(out / "model.onnx", describe("cpu", 1))

    def answer(**feeds: np.ndarray) -> np.ndarray:
        logits: np.ndarray = run(opened, feeds)["logits"]
        return logits

    (tmp_path / "dev.tsv").write_text("text\n" + "the good film\n" * 16)
    text = snippet("The latency gate")
    with serving({"small": answer, "dense": answer}, {"input_ids": IDS, "attention_mask": IDS}, output="logits") as url:
        # Bounds that this machine holds whatever else it does, and little time.
        for given, here in (
            ("grpc://localhost:8001", url),
            ('tokenizer="out"', 'tokenizer="out", seconds=0.1, load_seconds=0.1'),
            ('"5%", p99="10ms"', '"1000%", p99="10s"'),
            ("model_p50 < 20", "model_p50 < 20_000"),
            ("seconds=10", 'seconds=0.1, max_slowdown="1000%"'),
        ):
            assert given in text
            text = text.replace(given, here)
        (tmp_path / "test_latency.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", str(tmp_path)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def snippet(section: str) -> str:
    """The Python of a section of the README."""
    text = README.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    (found,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(found)


def test_what_the_readme_points_at_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
