"""Which class a model folder is loaded as, and the task that follows from it."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import transformers
from optimum.exporters.tasks import TasksManager
from transformers import PretrainedConfig, PreTrainedModel

from compressor import models
from compressor.errors import InputError, UsageError
from compressor.silence_libraries import one_line

OURS = {"text-generation": "causal-lm"}
"""Tasks that this product calls by another name than optimum."""

_USUAL = ["text-classification", "regression", "causal-lm", "translation", "question-answering"]
"""Tasks that rows are read for."""

_HEADS = {"regression": "text-classification", "translation": "text2text-generation"}
"""Tasks that load the class of another, and are only meant where they are named."""


def model_class(folder: Path, config: PretrainedConfig, task: str | None, remote: bool) -> tuple[Any, str]:
    """The class to load and the task's name.

    Without `task` it is the class that `config.architectures` names. With `task`, it is still that class if it serves
    the task, else the one that transformers has for this family and task: the weights then show whether it fits.

    Raises:
        InputError: the folder names no class that transformers or `compressor.models` has, or the class tells no task.
        UsageError: the task does not exist, or this family has no class for it.
    """
    named = (config.architectures or [""])[0]
    own = getattr(transformers, named, None) or getattr(models, named, None) if named else None
    if not (isinstance(own, type) and issubclass(own, PreTrainedModel)):
        own = None
    if task is not None:
        wanted = TasksManager.map_from_synonym(_HEADS.get(task, task))
        loader = _auto_class(task, wanted, config)
        if remote:
            return loader, OURS.get(task, task)
        cls = _class_for(loader, config)
        if cls is None and (own is None or wanted != _inferred(own)):
            raise UsageError(f"--task {task}: transformers has no {config.model_type} for it; name another task")
        return (cls or own), task if task in _HEADS else _named(wanted, config)
    if own is not None:
        found = _inferred(own)
        if found is None:
            raise InputError(f"{folder}: what {named} is for is not known; name it (--task text-classification, ...)")
        return own, _named(found, config)
    if remote and named:
        for name, loaders in TasksManager._TRANSFORMERS_TASKS_TO_MODEL_LOADERS.items():
            for loader in (loaders,) if isinstance(loaders, str) else loaders:
                if loader in (config.auto_map or {}):
                    return getattr(transformers, loader), _named(name, config)
    said = f"names the class {named!r}, which transformers {transformers.__version__} does not have" if named else ""
    raise InputError(
        f"{folder / 'config.json'}: {said or 'names no class (architectures)'}; name the task (--task), or save the"
        " model again with save_pretrained"
    )


def _auto_class(asked: str, task: str, config: PretrainedConfig) -> Any:
    try:
        return TasksManager.get_model_class_for_task(task, model_type=config.model_type)
    except (KeyError, ValueError) as error:
        known = sorted({OURS.get(name, name) for name in TasksManager.get_all_tasks()} | set(_HEADS))
        near = difflib.get_close_matches(asked, known, n=3) or _USUAL
        if isinstance(error, ValueError):
            raise UsageError(f"--task {asked}: {one_line(error)}") from error
        raise UsageError(f"--task {asked}: no such task; name one such as {', '.join(near)}") from error


def _class_for(loader: Any, config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of the model's family that an auto class loads; the named one where it has several."""
    found = loader._model_mapping.get(type(config), None)
    if isinstance(found, (tuple, list)):
        named = [cls for cls in found if cls.__name__ in (config.architectures or [])]
        found = named[0] if named else found[0]
    return found


def _inferred(cls: type[PreTrainedModel]) -> str | None:
    """optimum's name of the task of a class, or None."""
    if issubclass(cls, models.SegmentForCausalLM):
        return "text-generation"
    try:
        return str(TasksManager.infer_task_from_model(cls))
    except ValueError:
        # Not the class that an auto class loads first: a second one of the family, such as a projection on CLIP's text.
        return "feature-extraction" if cls.__name__.endswith(("Model", "ModelWithProjection")) else None


def _named(task: str, config: PretrainedConfig) -> str:
    """Our name of a task; a single logit under a classifier is a regression."""
    regression = config.problem_type == "regression" or (config.num_labels == 1 and config.problem_type is None)
    if task == "text-classification" and regression:
        return "regression"
    return OURS.get(task, task)
