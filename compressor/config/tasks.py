"""The tasks that rows can be read for. To add one, write its class in `compressor.tasks` and add one line here.

A task is named by the path of its class, so that loading a model folder or reading `--help` does not load the tasks.
`--task` also names custom tasks, classes outside of this package, by module or by entry point. Naming one loads code. A
recipe that is not trusted may therefore not name one; see `recipe_file.check_folder_recipe`.
"""

from __future__ import annotations

import hashlib
import re
import sys
import traceback
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from compressor.errors import ErrorCode, UsageError, suggestion
from compressor.silence_libraries import one_line


@dataclass(frozen=True)
class TaskEntry:
    """One class of a task.

    Attributes:
        name: value of `--task`.
        path: `module:class` in `compressor.tasks`, or of any importable module.
        model_task: Optimum's name of the task whose model class a folder is loaded as.
    """

    name: str
    path: str
    model_task: str

    def load(self) -> Any:
        """The class of the task."""
        return resolve_name(self.path)


def _task(name: str, path: str, model_task: str | None = None) -> TaskEntry:
    return TaskEntry(name, f"compressor.tasks.{path}", model_task or name)


ARRAYS = "arrays"
"""The task of every graph whose rows are arrays, which `--task` therefore does not name."""
TASKS: tuple[TaskEntry, ...] = (
    _task("text-classification", "classification:TextClassification"),
    _task("multi-label-classification", "classification:MultiLabelClassification", "text-classification"),
    _task("regression", "regression:Reranking", "text-classification"),
    _task("regression", "regression:Regression", "text-classification"),
    _task("causal-lm", "causal_lm:CharacterStreams", "text-generation"),
    _task("causal-lm", "causal_lm:Streams", "text-generation"),
    _task("causal-lm", "causal_lm:CausalLM", "text-generation"),
    _task("translation", "translation:Translation", "text2text-generation"),
    _task("question-answering", "question_answering:QuestionAnswering"),
    _task("token-classification", "token_labels:TokenClassification"),
    _task("fill-mask", "token_labels:FillMask"),
    _task("image-classification", "images:MultiLabelImages"),
    _task("image-classification", "images:ImageClassification"),
    _task(ARRAYS, "arrays:Arrays"),
    _task("sentence-similarity", "sentence_similarity:SentenceSimilarity", "feature-extraction"),
)
"""Where several classes share a name, the first that accepts a model folder is used."""

READ_AS = {"text2text-generation": "translation"}
"""Optimum's name of a task -> the task whose rows models for it read; not all of them read text."""

TASK_NAMES: tuple[str, ...] = tuple(dict.fromkeys(entry.name for entry in TASKS))
"""The names without repeats."""

SEQUENCE_CLASSIFIERS: tuple[str, ...] = tuple(
    entry.name for entry in TASKS if entry.model_task == "text-classification"
)
"""The tasks whose model has a head over a whole sequence."""

GROUP = "compressor.tasks"
"""Group of the entry points that name tasks."""
_PATH = re.compile(r"\w+(\.\w+)*:\w+")
_PACKAGES = (__package__.partition(".")[0], "graph_passes")
_BASE = "compressor.tasks.base"
"""Module of the class that every task inherits from; it needs PyTorch, which reading a recipe does not load."""


@dataclass(frozen=True)
class OwnTask:
    """A custom task.

    Attributes:
        task_class: the class, which inherits from `compressor.tasks.Task`.
        path: `module:class`.
        source: hash `sha256:...` of the files of the class and of those that it inherits from.
    """

    task_class: Any
    path: str
    source: str


def entry_point_names() -> tuple[str, ...]:
    """Names of the tasks that installed packages provide."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)} - set(TASK_NAMES)))


def is_own_task(name: object) -> bool:
    """Whether a value of `--task` names a custom task; this loads nothing."""
    return isinstance(name, str) and (":" in name or name in entry_point_names())


def load_own_task(name: str | None) -> OwnTask | None:
    """Import the custom task that a value of `--task` names; None for a task of this package, or for None.

    Raises:
        UsageError: the module cannot be imported, or has no such task.
    """
    if name is None or not is_own_task(name):
        return None
    entries = {entry.value for entry in entry_points(group=GROUP, name=name)}
    if len(entries) > 1:
        text = f"several packages provide it; name the class, {' or '.join(sorted(entries))}"
        raise _refuse(name, text, ErrorCode.CONTRADICTION)
    path = name if ":" in name else entries.pop()
    if not _PATH.fullmatch(path):
        raise _refuse(name, "not the path of a class; write package.module:Class", ErrorCode.INVALID_VALUE)
    module_name, _, class_name = path.partition(":")
    module = _import(name, module_name)
    task_class = getattr(module, class_name, None)
    if task_class is None:
        tasks = _own_tasks(module.__name__)
        remedy = suggestion(class_name, tasks) if tasks else "write a class that inherits from compressor.tasks.Task"
        raise _refuse(name, f"{module_name} has no {class_name}; {remedy}", ErrorCode.UNKNOWN_NAME)
    _check_task(name, class_name, task_class)
    return OwnTask(task_class, path, _source_hash(name, task_class))


def error_of_own_task(error: BaseException) -> UsageError | None:
    """The error that names the method of a custom task in which another was raised; None: it was not.

    Of the frames of this package and of modules that define a task, the innermost decides; libraries do not count.
    """
    if _BASE not in sys.modules:
        return None
    method = None
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module_name = str(frame.f_globals.get("__name__"))
        if module_name.partition(".")[0] in _PACKAGES:
            break
        if _own_tasks(module_name):
            method = f"{module_name}:{frame.f_code.co_qualname}"
    if method is None:
        return None
    return UsageError(
        f"--task {method} raises {type(error).__name__} ({one_line(error)}); correct the module (--debug: its line)",
        code=ErrorCode.TASK_FAILED,
        field="task",
        value=method,
    )


def _own_tasks(module_name: str) -> list[str]:
    """Names of the tasks that a module defines."""
    variables = vars(sys.modules[module_name]) if module_name in sys.modules else {}
    return [key for key, value in variables.items() if _is_task(value) and value.__module__ == module_name]


def _import(name: str, module: str) -> ModuleType:
    """The module of a task."""
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:  # its code is free to raise anything, and to end the process
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            text = f"no module {missing}; install its package, or add its folder to PYTHONPATH"
            raise _refuse(name, text, ErrorCode.UNKNOWN_NAME) from error
        text = f"importing {module} fails ({type(error).__name__}: {one_line(error)}); correct the module"
        raise _refuse(name, text, ErrorCode.IMPORT_FAILED) from error


def _is_task(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, import_module(_BASE).Task)


def _check_task(name: str, class_name: str, task_class: Any) -> None:
    """Raise UsageError unless a class is a task that declares everything that a task must."""
    if not _is_task(task_class):
        text = f"{class_name} is not a task; inherit from compressor.tasks.Task"
        raise _refuse(name, text, ErrorCode.INVALID_VALUE)
    missing = sorted(task_class.__abstractmethods__)
    missing += [field for field in ("name", "metrics") if not getattr(task_class, field, None)]
    if missing:
        text = f"{class_name} lacks {', '.join(missing)}; define {'it' if len(missing) == 1 else 'them'}"
        raise _refuse(name, text, ErrorCode.INVALID_VALUE, missing=tuple(missing))
    metric = import_module(_BASE).Metric
    if not isinstance(task_class.metrics, tuple) or not all(isinstance(value, metric) for value in task_class.metrics):
        text = f"metrics of {class_name} are not a tuple of compressor.tasks.Metric; write metrics = (Metric(...),)"
        raise _refuse(name, text, ErrorCode.INVALID_VALUE)


def _source_hash(name: str, task_class: Any) -> str:
    """`sha256:...` of the files of a class and of those that it inherits from, without this package and Python's."""
    digest, excluded = hashlib.sha256(), {*sys.stdlib_module_names, *_PACKAGES}
    names = dict.fromkeys(base.__module__ for base in task_class.__mro__)
    for module_name in (key for key in names if key.partition(".")[0] not in excluded):
        try:
            module: Any = sys.modules[module_name]
            digest.update(module.__loader__.get_data(module.__file__))
        except (AttributeError, KeyError, OSError) as error:  # a class without a file, or a file that is gone
            text = f"the source of {module_name} cannot be read; put the class into a file"
            raise _refuse(name, text, ErrorCode.FILE_UNREADABLE) from error
    return f"sha256:{digest.hexdigest()}"


def _refuse(name: str, text: str, code: ErrorCode, **details: Any) -> UsageError:
    return UsageError(f"--task {name}: {text}", code=code, field="task", value=name, **details)
