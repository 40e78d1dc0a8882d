"""The README's Python runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from graph_passes import find_attention, load
from tests import folders

README = Path(__file__).parent.parent / "README.md"


def test_the_python_of_the_readme_runs_as_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.save(folders.bert(), tmp_path / "model")
    rows = [f"{index % 2}\tthe {'good' if index % 2 else 'bad'} film {index % 5}" for index in range(40)]
    (tmp_path / "train.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    made: dict[str, object] = {}
    exec(snippet, made)
    assert (tmp_path / "out" / "report.html").is_file()
    assert [site.heads for site in find_attention(load("small.onnx"))] == [1]


def test_what_the_readme_points_at_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
