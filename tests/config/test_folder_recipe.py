"""The recipe inside a model folder is not trusted: it may not load code, and its paths may not leave the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.config.fields import extra_of, flag_of
from compressor.config.recipe_file import recipe_of
from compressor.config.run import FIELDS
from compressor.errors import ErrorCode, UsageError
from tests.tasks.own_tasks import write_package

VALUES = {"allow_pickle": "true", "trust_remote_code": "true", "kernel": '"k.so"', "ray": '"10.0.0.1:6379"'}
RUN_CODE = [name for name, field in FIELDS.items() if extra_of(field, "runs_code")]


def write(folder: Path, text: str) -> Path:
    file = folder / "compress.toml"
    file.write_text(text)
    return file


def test_every_field_that_runs_code_is_covered() -> None:
    assert set(RUN_CODE) == set(VALUES)


@pytest.mark.parametrize("name", RUN_CODE)
def test_a_recipe_in_a_folder_cannot_load_code(name: str, tmp_path: Path) -> None:
    write(tmp_path, f"{name} = {VALUES[name]}")
    with pytest.raises(UsageError) as caught:
        recipe_of(str(tmp_path), None, {})
    assert (caught.value.code, caught.value.details["field"]) == (ErrorCode.UNSAFE_RECIPE, name)
    assert flag_of(name) in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("task", ["tags:Spam", "spam"])
def test_a_recipe_in_a_folder_cannot_name_a_task_of_ones_own(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, packages = tmp_path / "model", tmp_path / "packages"
    folder.mkdir()
    packages.mkdir()
    write_package(packages, "spam = tags:Spam")
    monkeypatch.syspath_prepend(packages)
    file = write(folder, f'task = "{task}"')
    with pytest.raises(UsageError) as caught:
        recipe_of(str(folder), None, {})
    assert (caught.value.code, caught.value.details["field"]) == (ErrorCode.UNSAFE_RECIPE, "task")
    assert recipe_of(str(folder), str(file), {}).source.task == task
    write(folder, 'task = "causal-lm"')
    assert recipe_of(str(folder), None, {}).source.task == "causal-lm"
    assert recipe_of(str(folder), None, {"task": task}).source.task == task


@pytest.mark.parametrize("name", ["allow_pickle", "trust_remote_code"])
def test_a_named_recipe_and_a_flag_are_trusted(name: str, tmp_path: Path) -> None:
    file = write(tmp_path, f'model = "."\n{name} = true')
    assert recipe_of(None, str(file), {}).value(name) is True
    write(tmp_path, f"{name} = false")
    assert recipe_of(str(tmp_path), None, {name: True}).value(name) is True


@pytest.mark.parametrize("name", ["plan", "maps", "out", "timing_cache", "model"])
@pytest.mark.parametrize("path", ["../outside", "/etc/outside", "link/outside"])
def test_paths_outside_the_folder_are_refused(name: str, path: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    write(folder, f'{name} = "{path}"')
    with pytest.raises(UsageError) as caught:
        recipe_of(str(folder), None, {})
    assert (caught.value.code, caught.value.details["field"]) == (ErrorCode.UNSAFE_RECIPE, name)


def test_rows_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.tsv").write_text("label\ttext\n")
    write(folder, 'data = "../secret.tsv"\nkeep = 1')
    with pytest.raises(UsageError) as caught:
        recipe_of(str(folder), None, {})
    assert caught.value.code is ErrorCode.UNSAFE_RECIPE
    (folder / "rows.tsv").write_text("label\ttext\n")
    write(folder, 'data = "rows.tsv"\nkeep = 1\nout = "out"')
    assert recipe_of(str(folder), None, {}).rows.data == str(folder / "rows.tsv")
