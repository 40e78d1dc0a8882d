"""Write the tables of the documentation that are made from the code.

    python -m scripts.docs_tables        # rewrites the pages; a test fails while they are outdated

In a page, a table follows its marker, `<!-- table: NAME -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compressor.config.fields import reference_rows
from compressor.config.methods import METHODS
from compressor.config.run import FIELDS
from compressor.selection.options import option_models, option_rows

_ROWS = re.compile(r"\A\n?(?:[|].*\n)*\n?")
DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Table:
    """One table: its page, its name, and the function that makes it."""

    page: Path
    name: str
    make: Callable[[], str]


def markdown_table(header: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"|{'|'.join(line)}|" if line[0] == "---" else f"| {' | '.join(line)} |" for line in lines)


def recipe_table() -> str:
    """The table of all keys of a recipe."""
    return markdown_table(("key, flag", "default", "description"), reference_rows(FIELDS))


def methods_table() -> str:
    """The table of all methods."""
    rows = ((f"`{name}`", method.kind, method.description) for name, method in METHODS.items())
    return markdown_table(("method", "kind", "description"), rows)


def options_table() -> str:
    """The table of all options of all methods."""
    return markdown_table(("methods", "option", "default", "description"), _option_rows())


def _option_rows() -> Iterator[tuple[str, ...]]:
    """One row per option; methods with the same options share their rows."""
    methods: dict[type, list[str]] = {}
    for name in METHODS:
        for model in option_models(name):
            methods.setdefault(model, []).append(name)
    for model, names in sorted(methods.items(), key=lambda item: len(item[1])):
        for row in option_rows(model):
            yield ", ".join(f"`{name}`" for name in names), *row


TABLES = (
    Table(DOCS / "recipe.md", "recipe", recipe_table),
    Table(DOCS / "methods.md", "methods", methods_table),
    Table(DOCS / "methods.md", "options", options_table),
)


def with_tables(page: Path) -> str:
    """The text of a page with its tables updated."""
    text = page.read_text(encoding="utf-8")
    for table in tables_of(page):
        marker = f"<!-- table: {table.name} -->\n"
        before, after = text.split(marker)
        text = f"{before}{marker}\n{table.make()}\n{_after(after)}"
    return text


def _after(text: str) -> str:
    """The text after a table, without the old rows and with an empty line before it."""
    rest = _ROWS.sub("", text)
    return f"\n{rest}" if rest else ""


def tables_of(page: Path) -> Iterator[Table]:
    """The tables of a page."""
    return (table for table in TABLES if table.page == page)


if __name__ == "__main__":
    for path in sorted({table.page for table in TABLES}):
        path.write_text(with_tables(path), encoding="utf-8")
