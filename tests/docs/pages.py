"""The pages of the documentation, their code blocks, and the tables that are made from the code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "benchmarks").rglob("README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
COMMANDS = tuple(
    page for page in PAGES if page.parent.name != "results" and page.name not in ("RESULTS.md", "CHANGELOG.md")
)
"""Pages whose commands must work; the results keep the commands that they were made with."""


@dataclass(frozen=True)
class Block:
    """A code block: its page, its language, its text."""

    page: Path
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        yield Block(page, match[1], match[2])


def python_block(page: Path) -> str:
    """The only Python block of a page."""
    (text,) = (block.text for block in blocks(page) if block.language == "python")
    return text


def command_lines(page: Path) -> Iterator[list[str]]:
    """The commands in the shell blocks of a page as words, with continued lines joined and comments removed."""
    for block in blocks(page):
        if block.language not in ("", "sh", "bash"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            text = line.strip().removeprefix("$ ")
            if re.match(r"(compress|make|python|accelerate|pip)\b", text):
                yield shlex.split(text, comments=True)
