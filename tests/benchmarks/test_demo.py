"""The rows of the demo: which docstrings they are, and in which split."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks import demo

MAXIMUM = 20


@pytest.fixture
def splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[str, str]]]:
    monkeypatch.setattr(demo, "MAX_DOCSTRINGS", MAXIMUM)
    folders = {}
    for package, count in (("big", 3 * MAXIMUM), ("small", MAXIMUM // 2)):
        folders[package] = tmp_path / package
        folders[package].mkdir()
        functions = (f'def f{n}():\n    """Compute the {package} number {n} of a table."""\n' for n in range(count))
        (folders[package] / "module.py").write_text("".join([*functions, 'def same():\n    """Too short."""\n']))
        (folders[package] / "copy.py").write_text('"""The same six words of both packages."""\n')
    return demo.rows((package, text) for package, folder in folders.items() for text in demo.docstrings(folder))


def test_no_text_is_in_two_splits(splits: dict[str, list[tuple[str, str]]]) -> None:
    texts = [text for rows in splits.values() for _, text in rows]
    assert len(texts) == len(set(texts))


def test_packages_have_at_most_a_number_of_rows(splits: dict[str, list[tuple[str, str]]]) -> None:
    labels = Counter(package for split in ("train", "eval", "test") for package, _ in splits[split])
    assert labels["big"] == MAXIMUM
    assert labels["small"] in (MAXIMUM // 2, MAXIMUM // 2 + 1)


def test_every_split_is_a_file(splits: dict[str, list[tuple[str, str]]], tmp_path: Path) -> None:
    demo.write_rows(splits, tmp_path / "rows")
    for split in ("train", "eval", "test"):
        header, *rows = (tmp_path / "rows" / f"{split}.tsv").read_text().splitlines()
        assert header == "label\ttext"
        assert len(rows) == len(splits[split])
