"""The two screens of help: at most 25 options on the first, every option by step on the second."""

from __future__ import annotations

import re
import subprocess
import sys

import click
import pytest

from compressor.cli import cli
from compressor.cli.commands import SCREEN
from compressor.config.fields import config_field, flag_of
from compressor.config.run import FIELDS
from compressor.config.sections import HEADINGS
from tests.command import compress

Cap = pytest.CaptureFixture[str]


def listed(text: str) -> set[str]:
    """The options of a page of help, each by its first flag."""
    _, _, options = re.split(r"^(\w[\w -]*:)$", text, maxsplit=1, flags=re.MULTILINE)
    flags = re.findall(r"^  (?:-\w, )?(--[a-z][a-z0-9-]*)(?=[ ,]|$)", options, re.MULTILINE)
    assert len(flags) == len(set(flags))
    return set(flags)


def flags_of(command: click.Command) -> set[str]:
    """The options that a command accepts, each by its first flag with two dashes."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    return {next(flag for flag in option.opts if flag.startswith("--")) for option in options} | {"--help"}


@pytest.mark.parametrize("name", cli.commands)
def test_a_command_lists_all_options_on_one_screen_or_on_two(capfd: Cap, name: str) -> None:
    flags = flags_of(cli.commands[name])
    first, second = (compress(capfd, name, flag) for flag in ("--help", "--help-all"))
    assert (first.code, first.err) == (0, "")
    if second.code:
        assert listed(first.out) == flags
    else:
        assert "--help-all" in first.out
        assert listed(second.out) == flags | {"--help-all"}
        assert listed(first.out) < flags
    assert len(listed(first.out) - {"--help"}) <= SCREEN


def test_the_first_screen_of_a_run_has_what_the_readme_sets(capfd: Cap) -> None:
    first = listed(compress(capfd, "run", "--help").out)
    names = ("data", "eval_data", "test_data", "method", "keep", "max_drop", "speedup", "latency", "macs", "distill")
    assert first >= set(map(flag_of, (*names, "target", "precision", "batch", "seq", "out", "recipe")))


def test_options_of_a_run_are_listed_by_step(capfd: Cap) -> None:
    for flag in ("--help", "--help-all"):
        headings = re.findall(r"^(\w+):$", compress(capfd, "run", flag).out, re.MULTILINE)
        assert headings == [*HEADINGS, "Common"]


def test_the_summary_of_a_description_is_its_first_clause_and_its_default(capfd: Cap) -> None:
    description = FIELDS["seq"].description or ""
    first, default, further = description.split("; ")
    pages = [" ".join(compress(capfd, "run", flag).out.split()) for flag in ("--help", "--help-all")]
    assert [f"{first}; {default}" in page for page in pages] == [True, True]
    assert [further in page for page in pages] == [False, True]


def test_a_mistyped_option_is_compared_with_those_of_both_screens(capfd: Cap) -> None:
    assert "--prune-units" in compress(capfd, "model/", "--prune-unit", "heads").error
    assert compress(capfd, "sites", "model/", "--help-all").code == 2


def test_fields_are_not_basic_unless_marked() -> None:
    marks = [config_field(HEADINGS[0], "a", is_basic=basic).json_schema_extra["is_basic"] for basic in (False, True)]
    assert marks == [False, True]


def test_heavy_libraries_are_not_loaded_for_help() -> None:
    heavy = "{'torch', 'transformers', 'onnx', 'onnx_ir', 'onnxruntime', 'graph_passes'}"
    code = f"import sys, compressor.cli; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
