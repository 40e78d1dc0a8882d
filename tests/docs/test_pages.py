"""Links, commands and tables of the documentation are correct."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import click
import pytest

import compressor
import graph_passes
from benchmarks.studies.__main__ import NAME, studies
from compressor.cli import cli
from scripts.docs_tables import TABLES, with_tables
from tests.docs.pages import COMMANDS, PAGES, ROOT, command_lines

STUDIES = NAME.split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_point_to_existing_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_no_folder_of_a_machine(page: Path) -> None:
    folder = r"(?<![\w.$-])/(tmp|root|home|work|mnt|opt|srv|usr|var)/[^\s`'\"]*"
    assert not re.search(folder, page.read_text(encoding="utf-8"))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def parse(words: list[str]) -> None:
    """Parse a command line of `compress` or of the studies without running it."""
    if words[0] == "python":
        command, arguments = studies, words[3:]
    elif words[1] in cli.commands:
        command, arguments = cli.commands[words[1]], words[2:]
    else:
        command, arguments = cli.commands["run"], words[1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", words)
        command.make_context(str(command.name), list(arguments), obj=None, resilient_parsing=False)


@pytest.mark.parametrize("page", COMMANDS, ids=lambda page: page.name)
def test_commands_exist_with_their_flags(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in command_lines(page):
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), words
        if words[0] == "python" and "-m" in words:
            module = words[words.index("-m") + 1]
            assert module.startswith("tests.") or find_spec(module), words
        if words[:3] == STUDIES or (words[0] == "compress" and words[1:] not in (["--help"], ["--version"])):
            try:
                parse([word for word in words if word != "..."])
            except (click.exceptions.Exit, click.ClickException) as error:
                pytest.fail(f"{page.name}: {' '.join(words)}: {error}")


@pytest.mark.parametrize("page", sorted({table.page for table in TABLES}), ids=lambda page: page.name)
def test_tables_match_the_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == with_tables(page), "run `make docs` to write the tables"


@pytest.mark.parametrize("package", [compressor, graph_passes], ids=lambda package: package.__name__)
def test_the_reference_lists_the_public_names(package: ModuleType) -> None:
    page = ROOT / "docs" / "api" / f"{package.__name__}.md"
    listed = re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(package.__all__) <= {name.rpartition(".")[2] for name in listed}
