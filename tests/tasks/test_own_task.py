"""Custom tasks are found by module or entry point, checked, and never named by a folder that is not trusted."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from compressor.config.tasks import error_of_own_task, is_own_task, load_own_task
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.model_folder import ModelFolder, load
from compressor.tasks import Metric, make_task, open_data, statistics
from tests.command import compress
from tests.faults import fails_with
from tests.folders import rows_config
from tests.tasks.own_tasks import task_of_the_page, write_module, write_package
from tests.tasks.rows import forward_of, tsv

SPAM = """
from compressor.tasks.classification import TextClassification

class Spam(TextClassification):
    name = "spam"
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on Python's path, whose modules are forgotten afterwards."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    with pytest.MonkeyPatch.context() as modules:
        for name in ("tags", "spam_base"):
            modules.delitem(sys.modules, name, raising=False)
        yield folder
        for name in ("tags", "spam_base"):
            sys.modules.pop(name, None)


def test_the_task_of_the_page_is_one_short_file() -> None:
    assert len(task_of_the_page().splitlines()) <= 60


def test_a_class_is_found_by_its_module(path: Path, classifier: ModelFolder) -> None:
    file = write_module(path, SPAM)
    folder = load(classifier.path, task="tags:Spam")
    assert (folder.task, type(folder.model)) == ("text-classification", type(classifier.model))
    assert folder.own_task is not None
    assert folder.own_task.path == "tags:Spam"
    assert folder.own_task.source == f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    task = make_task(folder, rows_config())
    assert (task.name, type(task)) == ("spam", folder.own_task.task_class)


def test_a_class_is_found_by_its_entry_point(path: Path, classifier: ModelFolder) -> None:
    write_module(path, SPAM)
    write_package(path, "spam = tags:Spam\nregression = tags:Spam")
    assert (is_own_task("spam"), is_own_task("regression"), is_own_task("translation")) == (True, False, False)
    assert load_own_task("spam") == load_own_task("tags:Spam")
    assert load_own_task("regression") is None, "names of this package come first"
    assert make_task(load(classifier.path, task="spam"), rows_config()).name == "spam"
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, value="spamm") as caught:
        load(classifier.path, task="spamm")
    assert "spam" in str(caught.value)


def test_an_entry_point_of_several_packages_is_refused(path: Path) -> None:
    write_package(path, "spam = tags:Spam\n")
    (path / "tags-1.0.dist-info").rename(path / "first-1.0.dist-info")
    write_package(path, "spam = other:Spam\n")
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field="task"):
        load_own_task("spam")


def test_the_model_is_loaded_as_the_class_says(path: Path, classifier: ModelFolder) -> None:
    write_module(path, f"{SPAM}    model_task = 'regression'\n")
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="task", value="juggling"):
        write_module(path, f"{SPAM}    model_task = 'juggling'\n", "spam_base")
        load(classifier.path, task="spam_base:Spam")
    assert load(classifier.path, task="tags:Spam").task == "regression"


def test_the_hash_covers_the_files_of_base_classes(path: Path) -> None:
    write_module(path, SPAM, "spam_base")
    write_module(path, "from spam_base import Spam\n\nclass Ham(Spam):\n    name = 'ham'\n")
    sources = []
    for text in (SPAM, f"{SPAM}# changed\n"):
        write_module(path, text, "spam_base")
        task = load_own_task("tags:Ham")
        assert task is not None
        sources.append(task.source)
    assert sources[0] != sources[1]


def test_a_folder_that_the_class_does_not_accept_is_refused(path: Path, classifier: ModelFolder) -> None:
    write_module(path, f"{SPAM}    accepts = classmethod(lambda cls, folder: False)\n")
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, InputError, task="spam"):
        make_task(load(classifier.path, task="tags:Spam"), rows_config())


BROKEN: dict[str, tuple[str | None, str, ErrorCode]] = {
    "no module": (None, "tags:Spam", ErrorCode.UNKNOWN_NAME),
    "no package": (None, "nowhere.tags:Spam", ErrorCode.UNKNOWN_NAME),
    "missing import": ("import nowhere", "tags:Spam", ErrorCode.IMPORT_FAILED),
    "syntax": ("class Spam(", "tags:Spam", ErrorCode.IMPORT_FAILED),
    "exit": ("raise SystemExit(0)", "tags:Spam", ErrorCode.IMPORT_FAILED),
    "several lines": ("raise ValueError('one\\ntwo')", "tags:Spam", ErrorCode.IMPORT_FAILED),
    "no name": (SPAM, "tags:Spum", ErrorCode.UNKNOWN_NAME),
    "no class": ("Spam = 3", "tags:Spam", ErrorCode.INVALID_VALUE),
    "no task": ("class Spam: pass", "tags:Spam", ErrorCode.INVALID_VALUE),
    "abstract": ("from compressor.tasks import Task as Spam", "tags:Spam", ErrorCode.INVALID_VALUE),
    "no metrics": (f"{SPAM}    metrics = ()", "tags:Spam", ErrorCode.INVALID_VALUE),
    "names of metrics": (f"{SPAM}    metrics = ('accuracy',)", "tags:Spam", ErrorCode.INVALID_VALUE),
    "a metric alone": (f"{SPAM}    metrics = TextClassification.metrics[0]", "tags:Spam", ErrorCode.INVALID_VALUE),
    "a module that is not there": (f"{SPAM}\nSpam.__module__ = 'nowhere'", "tags:Spam", ErrorCode.FILE_UNREADABLE),
    "no class in the name": (SPAM, "tags:", ErrorCode.INVALID_VALUE),
    "a path": (SPAM, "./tags.py:Spam", ErrorCode.INVALID_VALUE),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_task_is_a_usage_error(
    case: str, path: Path, classifier: ModelFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    text, name, code = BROKEN[case]
    if text is not None:
        write_module(path, text)
    result = compress(capfd, "sites", classifier.path, "--task", name, "--quiet")
    assert (result.code, result.error_code) == (2, code), result.err
    assert (result.details["field"], result.details["value"]) == ("task", name)
    assert ";" in result.error


RAISING: dict[str, tuple[str, str]] = {
    "a method": ("def encode(self, rows, source):\n        raise ValueError('one\\ntwo')", "Spam.encode"),
    "a library": ("def encode(self, rows, source):\n        return json.loads('{')", "Spam.encode"),
    "a function": ("def encode(self, rows, source):\n        return helper()", "Spam.encode"),
    "a callback": (
        "def encode(self, rows, source):\n        return json.loads('{}', object_hook=lambda row: row['x'])",
        "Spam.encode",
    ),
    "a method behind one of the base": (
        "def encode_labels(self, *arguments):\n        return 1 / 0",
        "Spam.encode_labels",
    ),
    "the end of the process": ("def encode(self, rows, source):\n        raise SystemExit(0)", "Spam.encode"),
    "the constructor": ("def __init__(self, *arguments):\n        assert not arguments", "Spam.__init__"),
}
"""Where an error is raised -> a method, and the name that the error has of it."""


@pytest.mark.parametrize("case", RAISING)
def test_an_error_in_its_code_is_one_of_the_task(
    case: str, path: Path, classifier: ModelFolder, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    method, name = RAISING[case]
    write_module(path, f"import json\n{SPAM}\n    {method}\n\ndef helper():\n    raise KeyError('x')\n")
    rows = tsv(tmp_path / "rows.tsv", *(f"{number % 2}\tgood film" for number in range(8)))
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any error of the module
        open_data(rows_config(rows), load(classifier.path, task="tags:Spam"))
    error = error_of_own_task(caught.value)
    assert error is not None
    assert (error.code, error.details["value"]) == (ErrorCode.TASK_FAILED, f"tags:{name}")
    arguments = ("--task", "tags:Spam", "--data", rows, "--macs", "50%", "-o", tmp_path / "out", "--quiet")
    result = compress(capfd, classifier.path, *arguments)
    assert (result.code, result.out) == (2, "")
    assert f"tags:{name}" in result.error
    assert type(caught.value).__name__ in result.error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("encode(self, rows, source)", None),
        ("encode(self, rows, source)", "rows"),
        ("collate(self, examples)", None),
        pytest.param("per_example(self, logits, labels)", "labels", marks=pytest.mark.zoo),
    ],
)
def test_a_method_that_returns_something_else_is_a_usage_error(
    method: str,
    value: str | None,
    path: Path,
    classifier: ModelFolder,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    write_module(path, f"{SPAM}\n    def {method}:\n        return {value}\n")
    rows = tsv(tmp_path / "rows.tsv", *(f"{number % 2}\tgood film" for number in range(8)))
    arguments = ("--task", "tags:Spam", "--data", rows, "--macs", "50%", "-o", tmp_path / "out", "--quiet")
    result = compress(capfd, classifier.path, *arguments)
    assert (result.code, result.error_code) == (2, ErrorCode.TASK_FAILED), result.err
    name = method.partition("(")[0]
    assert (result.details["field"], result.details["value"]) == ("task", f"tags:Spam.{name}")


@pytest.mark.parametrize("value", ["None", "labels", "logits[:0]"])
def test_sums_that_are_not_those_of_each_example_are_a_usage_error(
    value: str, path: Path, classifier: ModelFolder, tmp_path: Path
) -> None:
    write_module(path, f"{SPAM}\n    def per_example(self, logits, labels):\n        return {value}\n")
    rows = tsv(tmp_path / "rows.tsv", *(f"{number % 2}\tgood film" for number in range(8)))
    data = open_data(rows_config(rows, rows, rows), load(classifier.path, task="tags:Spam"))
    with fails_with(ErrorCode.TASK_FAILED, UsageError, field="task", value="tags:Spam.per_example"):
        statistics(data.task, data.test, forward_of(classifier.model))


@pytest.mark.parametrize("labels", [None, np.zeros(2), np.array(0), torch.zeros(3)])
def test_labels_of_each_example_are_needed(labels: Any, classifier: ModelFolder) -> None:
    task = make_task(classifier, rows_config())
    batch = {"input_ids": np.zeros((3, 2)), **({} if labels is None else {"labels": labels})}
    value = "compressor.tasks.classification:TextClassification.collate"
    with fails_with(ErrorCode.TASK_FAILED, UsageError, field="task", value=value):
        task.pop_labels(batch, 3)


def nothing(statistics: np.ndarray) -> float:
    """A metric that lacks its `return`."""
    return None  # type: ignore[return-value]


def column_means(statistics: np.ndarray) -> float:
    """A metric that reduces one axis of two."""
    return statistics.mean(axis=0)


@pytest.mark.parametrize("compute", [nothing, column_means])
def test_a_metric_that_is_no_number_is_named(compute: Callable[[np.ndarray], float]) -> None:
    with fails_with(ErrorCode.TASK_FAILED, UsageError, field="task", value=f"{__name__}:{compute.__name__}"):
        Metric("broken", compute).value(np.zeros((3, 2)))


def test_a_class_that_takes_no_arguments_is_refused(path: Path, classifier: ModelFolder, tmp_path: Path) -> None:
    write_module(path, f"{SPAM}\n    def __init__(self):\n        pass\n")
    rows = tsv(tmp_path / "rows.tsv", "0\tgood film", "1\tbad film")
    with fails_with(ErrorCode.TASK_FAILED, UsageError, value="tags:Spam"):
        open_data(rows_config(rows), load(classifier.path, task="tags:Spam"))


def test_an_error_of_this_package_is_its_own(path: Path, classifier: ModelFolder, tmp_path: Path) -> None:
    method = "def per_example(self, logits, labels):\n        return super().per_example(logits, None)"
    write_module(path, f"{SPAM}\n    {method}\n")
    rows = tsv(tmp_path / "rows.tsv", *(f"{number % 2}\tgood film" for number in range(8)))
    data = open_data(rows_config(rows, rows, rows), load(classifier.path, task="tags:Spam"))
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any error of the package
        statistics(data.task, data.test, forward_of(classifier.model))
    assert error_of_own_task(caught.value) is None


def test_a_class_without_a_file_is_refused(monkeypatch: pytest.MonkeyPatch, classifier: ModelFolder) -> None:
    names: dict[str, Any] = {"__name__": "typed"}
    exec(SPAM, names)
    module = ModuleType("typed")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "typed", module)
    with fails_with(ErrorCode.FILE_UNREADABLE, UsageError, value="typed:Spam"):
        load(classifier.path, task="typed:Spam")
