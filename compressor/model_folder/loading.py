"""Load a model folder; its faults are reported before any other stage runs."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from compressor.config.own_tasks import OwnTask, load_own_task
from compressor.errors import ErrorCode, InputError
from compressor.model_folder.dense_layers import load_dense_layer
from compressor.model_folder.example_file import read_example
from compressor.model_folder.fingerprints import fingerprint
from compressor.model_folder.image_processor import IMAGE_CLASSIFICATION, ImageSize, processed_size
from compressor.model_folder.model_class import model_class
from compressor.model_folder.processor import load_processor, require_processor, set_padding_token
from compressor.model_folder.sentence_files import MODULES
from compressor.model_folder.sentence_modules import SentenceModules, read_sentence_modules
from compressor.model_folder.weight_checks import check_finite, check_weight_files
from compressor.models.answer_kind import several_answers
from compressor.models.sentence_encoder import SentenceEncoder
from compressor.results import Note, NoteCode
from compressor.silence_libraries import one_line, quiet_transformers
from compressor.targets.example_rows import ExampleRows

logger = logging.getLogger(__name__)

SENTENCE_SIMILARITY = "sentence-similarity"
_ENCODER = "feature-extraction"
"""Names of the tasks of an encoder with and without pooling."""


@dataclass(frozen=True)
class ModelFolder:
    """A loaded model folder.

    Attributes:
        path: the folder.
        model: float32, in evaluation mode.
        processor: the tokenizer, or the processor of images or sound; None if the folder has none.
        config: configuration of the model.
        fingerprint: `sha256:...` of weights and configuration, independent of the precision of the file.
        task: `text-classification`, `regression`, `causal-lm`, `question-answering`, or optimum's name of another task.
        family: transformers' model type, e.g. `bert`.
        notes: facts for the reader, e.g. tensors of the folder that the model does not use.
        example: inputs of the model `[row, ...]` by name, from which `example_inputs` are taken; empty: made up.
        sentence: what surrounds the encoder of a folder of sentence-transformers; None for other folders.
        own_task: the custom task that reads its rows; None: that of `task` does.
        image_size: size of the images that the processor of an image classifier makes; None for other models.
        layout: a row of its task, by which example inputs are laid out; None: as the tokenizer lays out texts.
        load_again: loads the folder again, as it is before anything ran on it; None: it was not loaded from files.
    """

    path: Path
    model: PreTrainedModel
    processor: Any
    config: PretrainedConfig
    fingerprint: str
    task: str
    family: str
    notes: tuple[Note, ...] = ()
    example: Mapping[str, Tensor] = field(default_factory=dict)
    sentence: SentenceModules | None = None
    own_task: OwnTask | None = None
    image_size: ImageSize | None = None
    layout: ExampleRows | None = None
    load_again: Callable[[], ModelFolder] | None = None

    @property
    def surroundings(self) -> dict[str, str]:
        """What the answers depend on besides weights and configuration, by name: for keys of what is learned."""
        pooling = ", ".join(self.model.settings) if isinstance(self.model, SentenceEncoder) else None
        source = None if self.own_task is None else self.own_task.source
        parts = {"pooling": pooling, "answers": several_answers(self.config), "task_source": source}
        return {name: text for name, text in parts.items() if text is not None}


def load(
    path: str | Path,
    *,
    task: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    needs_processor: bool = True,
    example_inputs: str | Path | None = None,
    pool_in_graph: bool = True,
) -> ModelFolder:
    """Load a model folder; nothing is downloaded.

    The model of a folder of sentence-transformers is a `SentenceEncoder`.

    Args:
        path: the folder.
        task: the task of the model, if its class does not determine it, or a custom task.
        allow_pickle: load `pytorch_model.bin` too; reading it can run code.
        trust_remote_code: run the Python files of the folder.
        needs_processor: raise an error for a text model without a tokenizer.
        example_inputs: an .npz file with one array `[row, ...]` for each input, for a model whose inputs cannot be made
            up; None: they are made up.
        pool_in_graph: whether the exported graph of a sentence encoder pools.

    Raises:
        InputError: the folder cannot be used.
        UsageError: the task does not exist, or transformers has no class of this family for it.
    """
    own_task = load_own_task(task)
    if own_task is not None:
        task = own_task.task_class.model_task
    path = Path(path)
    raw = _read_config(path)
    if raw.get("auto_map") and not trust_remote_code:
        raise InputError(
            f"{path}: the folder has its own Python code (auto_map in config.json), which runs only with permission;"
            " read it, then add --trust-remote-code",
            code=ErrorCode.UNSAFE_CODE,
            path=path,
            field="trust_remote_code",
        )
    pickled = check_weight_files(path, raw, allow_pickle)
    remote = bool(raw.get("auto_map")) and trust_remote_code
    with quiet_transformers():
        config = _load_config(path, trust_remote_code)
        cls, name = model_class(path, config, task, remote)
        sentence = _sentence_modules(path, name, named=task is not None)
        options = {} if sentence is None else _without_head(cls)
        model, info = _load_model(path, cls, config, pickled, remote, **options)
        processor = load_processor(path, trust_remote_code, images=name == IMAGE_CLASSIFICATION)
    _check_complete(path, type(model).__name__, info)
    check_finite(path, model)
    if needs_processor and model.main_input_name == "input_ids":
        require_processor(processor, path)
    set_padding_token(model, name, processor)
    has_images = name == IMAGE_CLASSIFICATION and processor is not None
    size = processed_size(path, model, processor) if has_images else None
    if sentence is not None:
        name = SENTENCE_SIMILARITY
        model = _with_pooling(path, model, sentence, processor, pool_in_graph, allow_pickle)
    notes = _notes_on_unused(path, cls, info)
    logger.debug("%s: loaded %s for %s", path, cls.__name__, name)
    example = {} if example_inputs is None else read_example(example_inputs, model)
    family = model.config.model_type
    return ModelFolder(
        path, model, processor, model.config, fingerprint(model), name, family, notes, example, sentence, own_task, size
    )


def _sentence_modules(path: Path, task: str, *, named: bool) -> SentenceModules | None:
    """What surrounds a sentence encoder; None for a model that is none.

    A reranker of sentence-transformers has modules too, and is a classifier with one class.

    Raises:
        InputError: a file of the modules cannot be used.
    """
    has_modules = task == _ENCODER and not named and (path / MODULES).is_file()
    return read_sentence_modules(path) if has_modules or task == SENTENCE_SIMILARITY else None


def _with_pooling(
    path: Path,
    encoder: PreTrainedModel,
    sentence: SentenceModules,
    processor: Any,
    pool_in_graph: bool,
    allow_pickle: bool,
) -> SentenceEncoder:
    """The encoder with its pooling and dense layers; the tokenizer gets the maximum length of the folder.

    Raises:
        InputError: the first token is pooled, and the tokenizer pads on the left; or a dense layer cannot be used.
    """
    if sentence.pooling == "cls" and getattr(processor, "padding_side", "right") == "left":
        raise InputError(
            f"{path}: the first token is pooled, and the tokenizer pads on the left (padding_side); save the tokenizer"
            " with padding on the right",
            code=ErrorCode.UNSUPPORTED_MODEL,
            path=path,
            field="padding_side",
            value="left",
        )
    if processor is not None and sentence.max_tokens is not None:
        processor.model_max_length = min(processor.model_max_length, sentence.max_tokens)
    model = SentenceEncoder(encoder, sentence.pooling, normalize=sentence.normalize, pool_in_graph=pool_in_graph)
    for part in sentence.dense:
        model.dense.append(load_dense_layer(path / part, model.width, allow_pickle=allow_pickle))
    return model.eval()


def _read_config(path: Path) -> dict[str, Any]:
    """The content of config.json, read before transformers reads it.

    Raises:
        InputError: it is missing, or not a configuration of transformers.
    """
    file = path / "config.json"
    if not path.exists():
        problem = "no such folder"
    elif not path.is_dir():
        problem = "is a file"
    elif not file.is_file():
        problem = "has no config.json" if any(path.iterdir()) else "is empty"
    else:
        problem = ""
    if problem:
        raise InputError(
            f"{path}: {problem}; give the folder that save_pretrained wrote", code=ErrorCode.FILE_MISSING, path=path
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{file}: cannot be read as JSON ({one_line(error)}); copy it again",
            code=ErrorCode.FILE_UNREADABLE,
            path=file,
        ) from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise InputError(
            f"{file}: has no model_type and is not a transformers configuration; save the model again",
            code=ErrorCode.FILE_UNREADABLE,
            path=file,
            field="model_type",
        )
    return raw


def _load_config(path: Path, remote: bool) -> PretrainedConfig:
    """The configuration as transformers reads it; raise InputError if it cannot."""
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=remote)
    except Exception as error:
        # A configuration is free-form: any value can break the class of any family.
        raise InputError(
            f"{path / 'config.json'}: cannot be used ({one_line(error)}); correct it or copy it again",
            code=ErrorCode.FILE_UNREADABLE,
            path=path / "config.json",
            reason=one_line(error),
        ) from error


def _without_head(cls: Any) -> dict[str, Any]:
    """Arguments of a class that leave out the layer by which some encoders summarize a text; it is often not saved."""
    return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(cls.__init__).parameters else {}


def _load_model(
    path: Path, cls: Any, config: PretrainedConfig, pickled: bool, remote: bool, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model in float32, and transformers' report on missing and unexpected tensors."""
    # Only auto classes have this parameter; a model class would treat it as a configuration entry.
    remote_options = {"trust_remote_code": True} if remote else {}
    try:
        model, info = cls.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=not pickled,
            output_loading_info=True,
            **remote_options,
            **options,
        )
    except Exception as error:
        # E.g. weights of other shapes, a quantization whose library is missing, a damaged pickle.
        raise InputError(
            f"{path}: the weights cannot be loaded as {cls.__name__} ({one_line(error)}); save model and configuration"
            " together",
            code=ErrorCode.FILE_MISMATCH,
            path=path,
            model_class=cls.__name__,
            reason=one_line(error),
        ) from error
    return model.float().eval(), info


def _check_complete(path: Path, name: str, info: dict[str, Any]) -> None:
    """Raise InputError if weights are missing, which transformers would initialize at random."""
    missing = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"{path}: no weights for {missing[0]}{more}, which {name} needs; fine-tune and save that head first, or"
            " name the task for which the folder was saved (--task)",
            code=ErrorCode.WEIGHTS_MISSING,
            path=path,
            tensors=tuple(missing),
            model_class=name,
        )


def _notes_on_unused(path: Path, cls: Any, info: dict[str, Any]) -> tuple[Note, ...]:
    """A note on tensors of the folder that the model does not use, if there are any."""
    unused = sorted(info["unexpected_keys"])
    if not unused:
        return ()
    text = f"{len(unused)} tensors of {path} are not used by {cls.__name__}, e.g. {unused[0]}"
    return (Note(text=text, code=NoteCode.TENSORS_UNUSED),)
