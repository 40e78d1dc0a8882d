"""The page on custom tasks: its commands run, with a class from a folder outside of the tree."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers as hf

import compressor
from compressor import report as reports
from compressor.cli import main
from compressor.config.run import Recipe
from compressor.errors import ErrorCode, UsageError
from compressor.results import NoteCode, Report
from compressor.run.rebuild import rebuild
from tests import folders
from tests.docs.pages import command_lines
from tests.run.listeners import RecordingListener
from tests.run.runs import learn
from tests.tasks.own_tasks import PAGE, TAGS, task_of_the_page, write_module, write_tagged_inputs

SHORT = ["--batch", "1", "--seq", "8", "--seconds", "0.01", "--max-length", "8", "--prune-rows", "8", "--quiet"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the first command of the page was run: a model, rows, the task, and the output."""
    path = write_inputs(tmp_path_factory.mktemp("tagged"))
    disabled = logging.root.manager.disable
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.syspath_prepend(path)
        patch.setenv("XDG_CACHE_HOME", str(path / "cache"))
        with pytest.raises(SystemExit) as ended:
            main(command_of_the_page())
    logging.disable(disabled)
    assert not ended.value.code
    del sys.modules["tags"]
    return path


def write_inputs(folder: Path) -> Path:
    """A folder with what the commands of the page read."""
    write_module(write_tagged_inputs(folder), task_of_the_page())
    return folder


def command_of_the_page() -> list[str]:
    """The arguments of the first command of the page, for a short run."""
    _, *words = next(words for words in command_lines(PAGE) if words[0] == "compress")
    return [*words, *SHORT]


@pytest.fixture
def report(folder: Path) -> Report:
    return reports.load(folder / "out")


@pytest.mark.zoo
def test_the_command_of_the_page_runs_with_the_path_of_python(tmp_path: Path) -> None:
    """In a process of its own, which finds the task where PYTHONPATH says."""
    path = write_inputs(tmp_path)
    search = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH"), str(Path.cwd())])])
    environment = {**os.environ, "PYTHONPATH": search, "XDG_CACHE_HOME": str(path / "cache")}
    command = [sys.executable, "-m", "compressor.cli", *command_of_the_page()]
    result = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert reports.load(path / "out").task == "tags"


def test_the_command_of_the_page_runs(folder: Path, report: Report) -> None:
    assert report.task_code is not None
    assert (report.task, report.task_code.path, report.recipe["task"]) == ("tags", "tags:Tags", "tags:Tags")
    assert report.task_code.source == f"sha256:{hashlib.sha256((folder / 'tags.py').read_bytes()).hexdigest()}"
    assert report.scores[0].metric == "tag-f1"
    assert all(proof.holds for proof in report.proofs)
    names = {name for row in report.answers for text in (row.dense, row.expected) for name in text.split(",")}
    assert names <= {*TAGS, ""}
    assert report.task_code.source in (folder / "out" / "report.html").read_text()


def test_names_and_tokenizer_are_in_the_output(folder: Path) -> None:
    assert hf.AutoConfig.from_pretrained(folder / "out").label2id == TAGS
    text = "the good film [MASK]"
    assert hf.AutoTokenizer.from_pretrained(folder / "out")(text) == folders.tokenizer()(text)


def test_a_build_does_not_load_the_task_that_a_report_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(folder / "out", tmp_path / "out"))
    shutil.copyfile(out / "model.onnx", out / "dense.onnx")
    monkeypatch.syspath_prepend(folder)
    listener = RecordingListener()
    built = rebuild(out, {"seconds": 0.01}, listener)
    assert NoteCode.ROWS_MISSING in listener.codes
    assert (built.scores, built.answers) == ((), ())
    assert "tags" not in sys.modules


@pytest.mark.zoo
def test_a_changed_task_is_not_resumed_with_the_work_of_the_former(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = write_module(tmp_path, task_of_the_page(), "tags_of_today")
    monkeypatch.syspath_prepend(tmp_path)
    fields = {
        "task": "tags_of_today:Tags",
        "keep": 1,
        "training_steps": 2,
        "batch_size": 8,
        "max_length": 8,
        "seconds": 0.01,
    }
    rows = str(folder / "rows.tsv")
    recipe = Recipe(model=folder / "model", data=rows, out=tmp_path / "out", batch=(1,), seq=(8,), **fields)
    learn(recipe)
    task.write_text(f"{task_of_the_page()}# changed\n")
    with pytest.raises(UsageError) as caught:
        compressor.compress(recipe)
    assert caught.value.code is ErrorCode.RUN_DIFFERS
    task.write_text(task_of_the_page())
    assert NoteCode.RESUMED in learn(recipe).codes
