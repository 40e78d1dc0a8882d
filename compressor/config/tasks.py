"""The tasks that rows can be read for. To add one, write its class in `compressor.tasks` and add one line here.

A task is named by the path of its class, so that loading a model folder or reading `--help` does not load the tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


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
        module, _, name = self.path.partition(":")
        return getattr(import_module(module), name)


def _task(name: str, path: str, model_task: str | None = None) -> TaskEntry:
    return TaskEntry(name, f"compressor.tasks.{path}", model_task or name)


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
    _task("arrays", "arrays:Arrays"),
    _task("sentence-similarity", "sentence_similarity:SentenceSimilarity", "feature-extraction"),
)
"""Where several classes share a name, the first that accepts a model folder is used."""

TASK_NAMES: tuple[str, ...] = tuple(dict.fromkeys(entry.name for entry in TASKS))
"""The names without repeats."""

SEQUENCE_CLASSIFIERS: tuple[str, ...] = tuple(
    entry.name for entry in TASKS if entry.model_task == "text-classification"
)
"""The tasks whose model has a head over a whole sequence."""
