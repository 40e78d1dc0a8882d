"""Load the weights of a model folder in float32; errors name tensors that are missing or have other shapes."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from compressor.errors import ErrorCode, InputError
from compressor.model_folder.files import WeightFiles
from compressor.model_folder.model_class import class_of_tensors, label_count, task_of_tensors
from compressor.results import Note, NoteCode
from compressor.silence_libraries import one_line
from graph_passes.errors import listed

_WRAPPERS = (
    *("_orig_mod", "module", "_module", "_forward_module"),
    *("_fsdp_wrapped_module", "_checkpoint_wrapped_module"),
)
"""Attributes in which compiled, parallel and checkpointed modules hold the module that they wrap."""
_WRAPPER = re.compile(rf"(?<![^.])(?:{'|'.join(_WRAPPERS)})\.")
_GENERATION = "generation_config.json"


def load_network(
    files: WeightFiles,
    cls: Any,
    config: PretrainedConfig,
    *,
    remote: bool = False,
    with_summary: bool = True,
    supplied: Collection[str] = (),
) -> tuple[PreTrainedModel, tuple[Note, ...]]:
    """Load the weights of a folder.

    Prefixes of names of a wrapped model, such as `_orig_mod.`, are removed if no tensor is missing afterwards.

    Args:
        remote: whether the code of the folder may run.
        with_summary: whether the pooling layer of a class is loaded if it is optional (`add_pooling_layer`); encoders
            of sentence-transformers are often saved without it.
        supplied: names of tensors that an adapter supplies, which the files may lack.

    Returns:
        The model, float32 and in evaluation mode; and notes, e.g. on tensors that it does not use.

    Raises:
        InputError: the weights cannot be read, or some are missing or have other shapes.
    """
    options: dict[str, Any] = {"trust_remote_code": True} if remote else {}  # only auto classes have this parameter
    if not with_summary and "add_pooling_layer" in inspect.signature(cls.__init__).parameters:
        options["add_pooling_layer"] = False
    source: dict[str, Any] = {"pretrained_model_name_or_path": files.folder, "use_safetensors": not files.pickled}
    model, info = _read(files, cls, config, **source, **options)
    missing, wrong = _faults(info, supplied)
    notes: tuple[Note, ...] = ()
    if missing and not remote:
        tensors = files.tensors()
        for prefix, names in _without_wrappers(list(tensors)):
            if missing.isdisjoint(names.values()):
                continue
            source = {
                "pretrained_model_name_or_path": None,
                "state_dict": {new: tensors[old] for old, new in names.items()},
            }
            unwrapped, unwrapped_info = _read(files, cls, config, **source, **options)
            still_missing, still_wrong = _faults(unwrapped_info, supplied)
            if not still_missing:
                model, info, missing, wrong = unwrapped, unwrapped_info, still_missing, still_wrong
                if (files.folder / _GENERATION).is_file() and model.can_generate():
                    model.generation_config = GenerationConfig.from_pretrained(files.folder, local_files_only=True)
                text = f"{files.path}: the names of the tensors have the prefix {prefix}, which was removed"
                notes = (Note(text=text, code=NoteCode.PREFIX_REMOVED),)
                break
    if missing:
        raise _missing_error(files, model, sorted(missing), info, of_adapter=bool(supplied))
    if wrong:
        raise _shape_error(files, type(model), config, wrong)
    if unused := sorted(info["unexpected_keys"]):
        text = f"{len(unused)} tensors of {files.folder} are not used by {cls.__name__}, e.g. {unused[0]}"
        notes = (*notes, Note(text=text, code=NoteCode.TENSORS_UNUSED))
    return model.float().eval(), notes


def _read(
    files: WeightFiles, cls: Any, config: PretrainedConfig, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and transformers' report on missing, unexpected and mismatched tensors."""
    try:
        return cls.from_pretrained(
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            # With peft installed, transformers would wrap the layers of an adapter in this subfolder.
            adapter_kwargs={"subfolder": "none"},
            **options,
        )
    except Exception as error:
        # E.g. contradicting sizes, or a damaged pickle.
        raise InputError.of_file(
            files.folder,
            f"the weights cannot be loaded as {cls.__name__} ({one_line(error)}); save model and"
            " configuration together",
            ErrorCode.FILE_MISMATCH,
            model_class=cls.__name__,
            reason=one_line(error),
        ) from error


def _faults(info: Mapping[str, Any], supplied: Collection[str]) -> tuple[set[str], list[tuple[str, Any, Any]]]:
    """The names of missing tensors; and names of tensors of other shapes, with the shapes of file and model."""
    missing = {name for name in info["missing_keys"] if name not in supplied}
    return missing, sorted(entry for entry in info["mismatched_keys"] if entry[0] not in supplied)


def _without_wrappers(names: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Prefixes that may be removed, each with a map of names in the file to names without it.

    Cases:
        1. Wrappers of modules, anywhere in a name: `encoder._orig_mod.layer.0.weight`.
        2. Then the common first part of all names: the attribute in which another module held the model.
    """
    current = {name: _WRAPPER.sub("", name) for name in names}
    removed = list(dict.fromkeys(part for name in names for part in _WRAPPER.findall(name)))
    while len(set(current.values())) == len(names):
        if removed:
            yield "".join(removed), current
        common = {new.partition(".")[0] for new in current.values()}
        if len(common) != 1 or not all("." in new for new in current.values()):
            return
        removed.append(f"{common.pop()}.")
        current = {old: new.partition(".")[2] for old, new in current.items()}


def _missing_error(
    files: WeightFiles, model: PreTrainedModel, missing: list[str], info: Mapping[str, Any], *, of_adapter: bool
) -> InputError:
    """The error of tensors that the model needs and the files lack; it shows what the files have instead."""
    name, unexpected = type(model).__name__, sorted(info["unexpected_keys"])
    prefix = f"{model.base_model_prefix}."
    is_head = not any(tensor.startswith(prefix) or model.base_model is model for tensor in missing)
    if of_adapter:
        advice = "the adapter was trained on random ones, so train it again with their layers in modules_to_save"
    elif (fitting := _fitting_class(model.config, list(files.tensors()))) is not None:
        fitting_class, task = fitting
        # Weights without a head are those of an encoder, or of a classifier whose head was not saved.
        lacks_head = is_head and task == "feature-extraction"
        advice = f"these are the weights of {fitting_class}, so name its task (--task {task})"
        advice += ", or fine-tune and save that head first" if lacks_head else ""
    elif is_head:
        advice = "fine-tune and save that head first, or name the task for which the folder was saved (--task)"
    elif unexpected:
        advice = f"save the model again with {name}.save_pretrained, or rename the tensors"
    else:
        advice = "copy the file of the whole model"
    content = f"has {listed(unexpected, 3)}, which {name} does not know, but " if unexpected else "has "
    return InputError.of_file(
        files.path,
        f"{content}no weights for {listed(missing, 3)}, which {'it' if unexpected else name} needs; {advice}",
        ErrorCode.WEIGHTS_MISSING,
        tensors=tuple(missing),
        unexpected=tuple(unexpected),
        model_class=name,
    )


def _fitting_class(config: PretrainedConfig, names: Sequence[str]) -> tuple[str, str] | None:
    """The class whose weights have these names, with or without prefixes of wrappers, and its task; or None."""
    forms: list[Collection[str]] = [names, *(renamed.values() for _, renamed in _without_wrappers(names))]
    exact = (class_of_tensors(config, form) for form in forms)
    part = (fitting[::-1] for form in forms if (fitting := task_of_tensors(config, form)) is not None)
    return next(itertools.chain(filter(None, exact), part), None)


def _shape_error(
    files: WeightFiles, cls: Any, config: PretrainedConfig, wrong: Sequence[tuple[str, Any, Any]]
) -> InputError:
    """The error of tensors that have another shape than the configuration says.

    Cases:
        1. The head has another number of classes than the configuration names, as a head of another task may have.
        2. Weights and configuration are those of two models.
    """
    shapes = listed([f"{tensor} {list(shape)}, not {list(needed)}" for tensor, shape, needed in wrong], 3)
    count = label_count(cls, config, {tensor: tuple(shape) for tensor, shape, _ in wrong})
    details: dict[str, Any] = {
        "code": ErrorCode.FILE_MISMATCH,
        "path": files.path,
        "tensors": tuple(tensor for tensor, *_ in wrong),
        "model_class": cls.__name__,
    }
    pairs = [pair for _, shape, needed in wrong for pair in zip_longest(needed, shape)]
    classes = (int(config.num_labels or 0), count)
    if count is None or not all(size == saved or (size, saved) == classes for size, saved in pairs):
        return InputError(
            f"{files.path}: has other shapes than config.json says: {shapes}; copy both from the same model", **details
        )
    message = (
        f"{files.path}: the head has {count} {'output' if count == 1 else 'outputs'}, and config.json names"
        f" {config.num_labels} classes ({shapes}); name {count} there (id2label and label2id)"
    )
    named = next(iter(config.architectures or ()), cls.__name__)
    if named != cls.__name__:
        message = f"{message}, or omit --task, since the folder is one of {named}"
    return InputError(message, **details, classes=count)
