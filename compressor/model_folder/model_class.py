"""The class of the model in a folder, and its task."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers
from optimum.exporters.tasks import TasksManager
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from compressor import models
from compressor.config.tasks import TASK_NAMES, TASKS, entry_point_names
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.model_folder.task_names import KINDS, RENAMED, declare_kind, requested_task, task_name
from compressor.silence_libraries import one_line


def model_class(
    folder: Path,
    config: PretrainedConfig,
    task: str | None,
    remote: bool,
    *,
    adapter_task: str | None = None,
    head: tuple[str, int] | None = None,
) -> tuple[Any, str]:
    """The class to load, and the name of its task.

    Without `task` it is the class that `config.architectures` names. With `task` it is the class of transformers for
    this family and task, else the named class if it is of that task. The task of an adapter takes precedence over that
    of the named class: adapters are often trained on a model without their head.

    Args:
        folder: the model folder, for error messages.
        remote: whether the code of the folder may run.
        adapter_task: optimum's name of the task of an adapter, or None.
        head: for a classifier whose head is added to a model of another task, the name of that task, and the number of
            outputs; None for other models.

    Raises:
        InputError: the folder names no class of transformers or `compressor.models`, or a class whose task is unknown.
        UsageError: the task does not exist, or this family has no class for it.
    """
    name = (config.architectures or [""])[0]
    named_class = _network(name)
    if head is not None:
        config.num_labels = head[1]
        if task in KINDS:
            declare_kind(task, config)
        cls, _ = _class_for_task(head[0], config, named_class, remote)
        return cls, task_name("text-classification", config)
    if adapter_task is not None and (named_class is None or _infer_task(named_class) != adapter_task):
        task = task or adapter_task
    if task is not None:
        return _class_for_task(task, config, named_class, remote)
    if named_class is not None:
        inferred = _infer_task(named_class)
        if inferred is None:
            raise InputError.of_file(
                folder,
                f"the task of {name} is unknown; name it, e.g. --task text-classification",
                ErrorCode.UNSUPPORTED_MODEL,
                field="task",
                model_class=name,
            )
        return named_class, task_name(inferred, config)
    if remote and name and (remote_class := _remote_class(config)) is not None:
        return remote_class
    problem = (
        f"names the class {name!r}, which transformers {transformers.__version__} does not have"
        if name
        else "names no class (architectures)"
    )
    raise InputError(
        f"{folder / 'config.json'}: {problem}; name the task (--task), or save the model again with save_pretrained",
        code=ErrorCode.UNSUPPORTED_MODEL,
        path=folder / "config.json",
        field="architectures",
        value=name,
    )


def _network(name: str) -> type[PreTrainedModel] | None:
    """The model of transformers or `compressor.models` that has a name, or None."""
    cls = getattr(transformers, name, None) or getattr(models, name, None)
    return cls if isinstance(cls, type) and issubclass(cls, PreTrainedModel) else None


def _remote_class(config: PretrainedConfig) -> tuple[Any, str] | None:
    """The auto class that loads the code of a folder, and the name of its task; None: the configuration names none."""
    for optimum_task, loaders in TasksManager._TRANSFORMERS_TASKS_TO_MODEL_LOADERS.items():
        for loader in (loaders,) if isinstance(loaders, str) else loaders:
            if loader in (config.auto_map or {}):
                return getattr(transformers, loader), task_name(optimum_task, config)
    return None


def task_of_tensors(config: PretrainedConfig, names: Collection[str]) -> tuple[str, str] | None:
    """The task whose class uses most of these tensors and needs no further ones, and the name of the class, or None."""
    fitting = []
    for entry in TASKS:
        try:
            cls, task = _class_for_task(entry.name, copy.deepcopy(config), None, remote=False)
            needed = set(_empty(cls, config).state_dict())
        except Exception:  # the family has no class for the task, or the configuration does not suit the class
            continue
        needed -= _tied(cls, needed)
        if needed <= set(names):
            fitting.append((len(needed), task, cls.__name__))
    return max(fitting)[1:] if fitting else None


def class_of_tensors(config: PretrainedConfig, names: Collection[str]) -> tuple[str, str] | None:
    """The class with exactly these tensors, and its task; None if no or several classes of the family have them."""
    mappings = [value for name, value in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    entries = [mapping[config.model_type] for mapping in mappings if config.model_type in mapping]
    registered = dict.fromkeys(name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry))
    fitting = []
    for cls in filter(None, map(_network, registered)):
        try:
            tensors = set(_empty(cls, config).state_dict())
        except Exception:  # the configuration does not suit the class
            continue
        if (task := _infer_task(cls)) is not None and tensors - _tied(cls, tensors) <= set(names) <= tensors:
            fitting.append((cls, task))
    if len(fitting) != 1:
        return None
    ((cls, task),) = fitting
    loaded = _class_of_family(_auto_class(task, task, config), config)
    return (cls.__name__, task_name(task, config)) if loaded is cls else None


def _tied(cls: Any, names: Collection[str]) -> set[str]:
    """Tensors that a file may lack, because they are tied to others."""
    patterns = tuple(getattr(cls, "_tied_weights_keys", None) or ())
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def label_count(cls: Any, config: PretrainedConfig, shapes: dict[str, tuple[int, ...]]) -> int | None:
    """The number of classes of a head with tensors of these shapes, by name; None if no tensor depends on it."""
    try:
        single, double = (
            {name: tuple(tensor.shape) for name, tensor in _empty(cls, config, num_labels=count).state_dict().items()}
            for count in (1, 2)
        )
    except Exception:  # the configuration does not suit the class, which loading reports
        return None
    for name, shape in shapes.items():
        sizes = zip(single.get(name, ()), double.get(name, ()), shape, strict=False)
        if (count := next((size for first, second, size in sizes if first != second), None)) is not None:
            return count
    return None


def _empty(cls: Any, config: PretrainedConfig, **settings: Any) -> PreTrainedModel:
    """A model on the device `meta`."""
    config = copy.deepcopy(config)
    for name, value in settings.items():
        setattr(config, name, value)
    with torch.device("meta"):
        return cls(config)


def _class_for_task(
    task: str, config: PretrainedConfig, named_class: type[PreTrainedModel] | None, remote: bool
) -> tuple[Any, str]:
    """The class for a requested task, and the name of the task in this package."""
    model_tasks = {entry.name: entry.model_task for entry in TASKS if entry.model_task != entry.name}
    optimum_task = TasksManager.map_from_synonym(model_tasks.get(task, task))
    loader = _auto_class(task, optimum_task, config)
    if remote:
        return loader, RENAMED.get(task, task)
    family_class = _class_of_family(loader, config)
    if family_class is None and (named_class is None or optimum_task != _infer_task(named_class)):
        raise UsageError(
            f"--task {task}: transformers has no class of {config.model_type} for it; name another task",
            code=ErrorCode.UNSUPPORTED_MODEL,
            field="task",
            value=task,
            family=config.model_type,
        )
    return (family_class or named_class), requested_task(task if task in model_tasks else optimum_task, config)


def _auto_class(requested: str, optimum_task: str, config: PretrainedConfig) -> Any:
    """The auto class of transformers for a task; raise UsageError if it has none."""
    try:
        return TasksManager.get_model_class_for_task(optimum_task, model_type=config.model_type)
    except (KeyError, ValueError) as error:
        details: dict[str, Any] = {"field": "task", "value": requested}
        if isinstance(error, ValueError):
            raise UsageError(
                f"--task {requested}: {one_line(error)}; name another task", code=ErrorCode.UNSUPPORTED_MODEL, **details
            ) from error
        optimum_names = {RENAMED.get(name, name) for name in TasksManager.get_all_tasks()}
        known = sorted({*optimum_names, *TASK_NAMES, *entry_point_names()})
        similar = difflib.get_close_matches(requested, known, n=3) or TASK_NAMES
        raise UsageError(
            f"--task {requested}: no such task; name one such as {', '.join(similar)}",
            code=ErrorCode.UNKNOWN_NAME,
            **details,
        ) from error


def _class_of_family(loader: Any, config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class that an auto class loads for a family, or that of several which the configuration names; or None."""
    classes = loader._model_mapping.get(type(config), None)
    if isinstance(classes, (tuple, list)):
        named = [cls for cls in classes if cls.__name__ in (config.architectures or [])]
        return named[0] if named else classes[0]
    return classes


def _infer_task(cls: type[PreTrainedModel]) -> str | None:
    """Optimum's name of the task of a class, or None."""
    if issubclass(cls, models.SegmentForCausalLM):
        return "text-generation"
    reads_text = cls.main_input_name == "input_ids"
    if reads_text and cls.__name__ in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values():
        return "text2text-generation"  # optimum takes BART for a masked language model
    try:
        return str(TasksManager.infer_task_from_model(cls))
    except ValueError:
        if cls.__name__.endswith("ForImageClassification"):
            return "image-classification"  # optimum lacks families with several such classes, e.g. DeiT
        # A class that no auto class loads, such as CLIP's text model with projection.
        return "feature-extraction" if cls.__name__.endswith(("Model", "ModelWithProjection")) else None
