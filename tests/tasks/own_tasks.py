"""Packages with custom tasks, in folders outside of the tree."""

from __future__ import annotations

from pathlib import Path

from tests import folders
from tests.docs.pages import ROOT, python_block

PAGE = ROOT / "docs" / "tasks" / "own_task.md"
TAGS = {"good": 0, "bad": 1, "very": 2}
"""The tags of the model, in order."""


def write_module(folder: Path, text: str, name: str = "tags") -> Path:
    """Write a module; return its file."""
    file = folder / f"{name}.py"
    file.write_text(text, encoding="utf-8")
    return file


def write_package(folder: Path, entry_points: str) -> None:
    """What an installer leaves of a package with these entry points, so that the folder on the path provides them."""
    metadata = folder / "tags-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tags\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[compressor.tasks]\n{entry_points}\n")


def task_of_the_page() -> str:
    """The module on the page of custom tasks."""
    return python_block(PAGE)


def write_tagged_inputs(folder: Path) -> Path:
    """A folder with `model`, which gives a text several tags, `rows.tsv` and `test.tsv`."""
    names = {"id2label": {index: tag for tag, index in TAGS.items()}, "label2id": TAGS}
    folders.save(folders.bert(num_labels=3, problem_type="multi_label_classification", **names), folder / "model")
    words = list(TAGS)
    cells = [[tag for bit, tag in enumerate(words) if number >> bit & 1] or ["none"] for number in range(48)]
    rows = [f"{','.join(tags)}\tthe {' '.join(tags)} film" for tags in cells]
    for name in ("rows.tsv", "test.tsv"):
        (folder / name).write_text("\n".join(["label\ttext", *rows, ""]))
    return folder
