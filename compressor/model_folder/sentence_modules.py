"""Read the files of sentence-transformers that describe the modules around an encoder, and its prompts.

A sentence encoder has a pooling and, possibly, dense layers and normalisation. A reranker has a pooling and a head of
layers, or is a language model that answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, InputError
from compressor.model_folder.files import (
    CONFIG,
    MODULES,
    PICKLED_WEIGHTS,
    SAFE_WEIGHTS,
    check_finite,
    check_weight_files,
    damaged,
    read_json,
    read_object,
)
from compressor.model_folder.sentence_texts import (
    DEFAULT_PROMPT,
    LIBRARY_CONFIG,
    POOLING,
    TEXT_CONFIG,
    SentenceTexts,
    invalid_entry,
    is_outside,
    listed_modules,
    module_folders,
    text_settings,
)
from compressor.models.pooled_encoder import (
    ACTIVATIONS,
    POOLINGS,
    Answers,
    CausalReranker,
    DenseLayer,
    HeadLayer,
    ModuleReranker,
    NormLayer,
    SentenceEncoder,
)
from compressor.silence_libraries import one_line

EncoderT = TypeVar("EncoderT", bound=Any)

EMBEDDING, SCORES = "sentence_embedding", "scores"
"""The library's names of what modules after the pooling read and write."""
_TRANSFORMER, _DENSE, _NORMALIZE = "Transformer", "Dense", "Normalize"
_ORDER = re.compile(f"{_TRANSFORMER} {POOLING}( {_DENSE})*( {_NORMALIZE})?")
_ENCODER_ORDER = f"{_TRANSFORMER}, {POOLING} and, possibly, {_DENSE} and {_NORMALIZE}"
_SAVE = "save the model again with sentence-transformers (SentenceTransformer.save_pretrained)"
_MODE_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of older versions of the library -> name of the pooling."""
_NORM, _DROPOUT = "LayerNorm", "Dropout"
_ANSWERS = "LogitScore"
_LAYERS = (_DENSE, _NORM, _DROPOUT)
_RERANKER = "CrossEncoder"
_RERANKER_ORDER = f"{_TRANSFORMER}, {POOLING} and a head of {', '.join(_LAYERS)}, whose last {_DENSE} writes {SCORES}"
_DENSE_TENSORS = _WEIGHT, _RESIDUAL, _BIAS = "linear.weight", "residual.weight", "linear.bias"
_NORM_WEIGHT, _NORM_BIAS = "norm.weight", "norm.bias"


@dataclass(frozen=True)
class SentenceModules(SentenceTexts):
    """The modules around the encoder of a folder of sentence-transformers, and how its texts are prepared.

    Attributes:
        pooling: a name in `compressor.models.pooled_encoder.POOLINGS`.
        normalize: whether embeddings have norm one.
        dense: the paths in the folder of the dense layers between pooling and normalisation, in order.
    """

    pooling: str
    normalize: bool
    dense: tuple[str, ...] = ()

    def wrap(
        self, path: Path, encoder: PreTrainedModel, processor: Any, *, pool_in_graph: bool, allow_pickle: bool
    ) -> SentenceEncoder:
        """The encoder of a folder with its pooling; see `complete`."""
        model = SentenceEncoder(encoder, self.pooling, normalize=self.normalize, pool_in_graph=pool_in_graph)
        return self.complete(path, model, processor, allow_pickle=allow_pickle)

    def complete(self, path: Path, model: EncoderT, processor: Any, *, allow_pickle: bool = False) -> EncoderT:
        """An encoder with the dense layers of a folder, whose tokenizer gets the folder's maximum length.

        Raises:
            InputError: the first token is pooled, and the tokenizer pads on the left; or a layer cannot be used.
        """
        _prepare_tokenizer(path, processor, self.pooling, self.max_tokens)
        for part in self.dense:
            model.dense.append(load_dense_layer(path / part, model.width, allow_pickle=allow_pickle))
        model.eval()
        return model


def _prepare_tokenizer(path: Path, processor: Any, pooling: str, max_tokens: int | None) -> None:
    """Set the maximum length of a tokenizer; raise InputError if it pads on the left, and the first token is pooled."""
    if pooling == "cls" and getattr(processor, "padding_side", "right") == "left":
        text = (
            "the first token is pooled, and the tokenizer pads on the left (padding_side); save the tokenizer"
            " with padding on the right"
        )
        raise InputError.of_file(path, text, ErrorCode.UNSUPPORTED_MODEL, field="padding_side", value="left")
    if processor is not None and max_tokens is not None:
        processor.model_max_length = min(processor.model_max_length, max_tokens)


def read_sentence_modules(folder: Path) -> SentenceModules:
    """The modules around the encoder of a folder.

    Raises:
        InputError: a file is missing or damaged, or the folder has a module or a pooling that is not supported.
    """
    modules = _supported_modules(folder)
    (_, pooling), *layers = modules[1:]
    return SentenceModules(
        pooling=_pooling_of(folder / pooling / CONFIG),
        normalize=any(name == _NORMALIZE for name, _ in layers),
        dense=tuple(path for name, path in layers if name == _DENSE),
        **text_settings(folder),
    )


def _supported_modules(folder: Path) -> list[tuple[str, str]]:
    """The class and path of each module; raise InputError unless they are those of a sentence encoder."""
    file = folder / MODULES
    if not file.is_file():
        problem = f"{folder}: no {MODULES}, which says how tokens are pooled; {_SAVE}"
        raise InputError(problem, code=ErrorCode.FILE_MISSING, path=file)
    entries = read_json(file)
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("type"), str) and isinstance(entry.get("path"), str)
        for entry in entries
    ):
        raise damaged(file, ValueError("not a list of modules, each with a type and a path"))
    modules = listed_modules(folder)
    names = [name for name, _ in modules]
    for name in names:
        if name not in (_TRANSFORMER, POOLING, _DENSE, _NORMALIZE):
            text = f"the module {name} is not supported; use a model that consists of {_ENCODER_ORDER}"
            raise _unsupported(file, "type", name, text)
    if not _ORDER.fullmatch(" ".join(names)):
        listed = ", ".join(names)
        text = f"the modules are {listed or 'missing'}; use a model that consists of {_ENCODER_ORDER}, in this order"
        raise _unsupported(file, "type", listed, text)
    _require_inside(folder, [path for _, path in modules])
    return modules


def _require_inside(folder: Path, paths: Sequence[str]) -> None:
    """Raise InputError unless the first module is in the folder itself, and the others are below it."""
    file = folder / MODULES
    outside = next((path for path in paths if is_outside(PurePosixPath(path))), None)
    if outside is not None:
        raise _unsupported(file, "path", outside, f"{outside} is outside of the folder; {_SAVE}")
    if paths[0]:
        text = f"the encoder is in the folder {paths[0]}, not in that of {MODULES}; {_SAVE}"
        raise _unsupported(file, "path", paths[0], text)


def _pooling_of(file: Path) -> str:
    """The name of the pooling; raise InputError for one that is not supported."""
    config = read_object(file, required=True)
    modes = _modes(file, config)
    unknown = next((mode for mode in modes if mode not in POOLINGS), None)
    if unknown is not None:
        text = f"the pooling {unknown} (pooling_mode) is not supported; use one of {', '.join(POOLINGS)}"
        raise _unsupported(file, "pooling_mode", unknown, text)
    if len(modes) > 1:
        text = f"the poolings {' and '.join(modes)} are joined (pooling_mode); use a model with one of them"
        raise _unsupported(file, "pooling_mode", "+".join(modes), text)
    if not config.get("include_prompt", True):
        text = "tokens of prompts are left out (include_prompt), but the graph does not know them; use a model without"
        raise _unsupported(file, "include_prompt", False, text)
    return modes[0]


def _modes(file: Path, config: Mapping[str, Any]) -> list[str]:
    """The names of the poolings that are joined: those of `pooling_mode`, else those of the keys of older versions."""
    flags = {key: value for key, value in config.items() if key.startswith("pooling_mode_")}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise invalid_entry(file, key, value, "is neither true nor false")
        if value and key not in _MODE_FLAGS:
            text = f"the pooling {key} is not supported; use a model with one of {', '.join(_MODE_FLAGS)}"
            raise _unsupported(file, key, value, text)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _MODE_FLAGS.items() if flags.get(key)] if flags else ["mean"]
        if not modes:
            raise invalid_entry(file, "pooling_mode", None, f"is missing, and none of {', '.join(flags)} is true")
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or not all(isinstance(mode, str) for mode in modes):
        raise invalid_entry(file, "pooling_mode", modes, "is neither a text nor a list of texts")
    return modes


@dataclass(frozen=True)
class RerankerModules:
    """The modules of a reranker after its encoder.

    Attributes:
        pooling: a name in `compressor.models.pooled_encoder.POOLINGS`.
        layers: the class and the folder of each layer of the head, in order, without dropout.
        outputs: number of scores.
        max_tokens: maximum number of tokens of a pair; None: that of tokenizer and model.
        answers: of a language model that answers: its tokens, and how it reads a pair; None: an encoder with a head.
    """

    pooling: str
    layers: tuple[tuple[str, str], ...]
    outputs: int
    max_tokens: int | None
    answers: Answers | None = None

    @property
    def head(self) -> tuple[str, int]:
        """The task of the model class that the head is added to, and the number of scores."""
        return ("text-generation" if self.answers else "feature-extraction"), self.outputs

    def wrap(
        self, path: Path, encoder: PreTrainedModel, processor: Any, *, pool_in_graph: bool, allow_pickle: bool
    ) -> ModuleReranker:
        """The encoder of a folder with its pooling and head; the tokenizer gets the maximum length of the folder.

        Raises:
            InputError: the first token is pooled, and the tokenizer pads on the left; or a layer cannot be used.
        """
        _prepare_tokenizer(path, processor, self.pooling, self.max_tokens)
        if self.answers is not None:
            try:
                return CausalReranker(encoder, self.answers).eval()
            except (ValueError, IndexError, AttributeError) as error:
                raise InputError.of_file(
                    path,
                    f"{type(encoder).__name__} cannot score pairs by the logits of two tokens"
                    f" ({one_line(error)}); use a reranker with a classifier, or name another task (--task causal-lm)",
                    ErrorCode.UNSUPPORTED_MODEL,
                ) from error
        width: int = encoder.config.get_text_config().hidden_size
        layers: list[HeadLayer] = []
        for number, (name, folder) in enumerate(self.layers, 1):
            if name == _NORM:
                layers.append(_load_norm_layer(path / folder, width, allow_pickle=allow_pickle))
                continue
            writes = SCORES if number == len(self.layers) else EMBEDDING
            layer = load_dense_layer(path / folder, width, allow_pickle=allow_pickle, writes=writes)
            layers.append(layer)
            width = len(layer.weight)
        folders = [folder for _, folder in self.layers]
        return ModuleReranker(encoder, self.pooling, layers, folders, pool_in_graph=pool_in_graph).eval()


def read_reranker_modules(folder: Path) -> RerankerModules | None:
    """The modules of a reranker; None for another folder, and for a reranker that is a classifier of transformers.

    Raises:
        InputError: a file is missing or damaged, or the folder has other modules.
    """
    modules = listed_modules(folder)
    names = [name for name, _ in modules]
    if names == [_TRANSFORMER, _ANSWERS]:
        return _of_language_model(folder, modules[1][1])
    if POOLING not in names or not _is_reranker(folder):
        return None
    _require_inside(folder, [path for _, path in modules])
    dense = [path for name, path in modules if name == _DENSE]
    if names[:2] != [_TRANSFORMER, POOLING] or not set(names[2:]) <= set(_LAYERS) or names[-1] != _DENSE:
        text = f"the modules of the reranker are {', '.join(names)}; use one that consists of {_RERANKER_ORDER}"
        raise _unsupported(folder / MODULES, "type", ",".join(names), text)
    outputs = read_object(folder / dense[-1] / CONFIG, required=True).get("out_features")
    if type(outputs) is not int or outputs < 1:
        problem = f"{folder / dense[-1]}: the number of scores (out_features) is {outputs!r}; copy the file again"
        raise InputError(problem, code=ErrorCode.FILE_UNREADABLE, path=folder / dense[-1], field="out_features")
    settings = text_settings(folder)
    if settings["default_prompt"] is not None and settings["prompts"].get(settings["default_prompt"]):
        text = "the reranker puts a prompt before its texts (default_prompt_name); use one without"
        raise _unsupported(folder / LIBRARY_CONFIG, DEFAULT_PROMPT, settings["default_prompt"], text)
    layers = tuple((name, path) for name, path in modules if name in (_DENSE, _NORM))
    pooling = _pooling_of(folder / modules[1][1] / CONFIG)
    return RerankerModules(pooling, layers, outputs, settings["max_tokens"])


def _of_language_model(folder: Path, module: str) -> RerankerModules:
    """The modules of a language model that scores by the logits of answers."""
    _require_inside(folder, ["", module])
    file = folder / module / CONFIG
    config = read_object(file, required=True)
    positive, negative = config.get("true_token_id"), config.get("false_token_id")
    if type(positive) is not int or type(negative) not in (int, type(None)):
        raise invalid_entry(file, "true_token_id", (positive, negative), "are not the numbers of two tokens")
    settings = text_settings(folder)
    processing = read_object(folder / TEXT_CONFIG, required=False).get("processing_kwargs")
    template = processing.get("chat_template") if isinstance(processing, dict) else None
    arguments = {name: value for name, value in (template or {}).items() if name != "restore_suffix"}
    prompt = settings["prompts"].get(settings["default_prompt"], "")
    return RerankerModules("lasttoken", (), 1, settings["max_tokens"], Answers(positive, negative, prompt, arguments))


def _is_reranker(folder: Path) -> bool:
    """Whether a folder with a pooling is a reranker: the library's settings say so, or a dense layer writes scores."""
    if read_object(folder / LIBRARY_CONFIG, required=False).get("model_type") == _RERANKER:
        return True
    configs = (folder / path / CONFIG for path in module_folders(folder))
    return any(read_object(file, required=False).get("module_output_name") == SCORES for file in configs)


def load_dense_layer(folder: Path, width: int, *, allow_pickle: bool, writes: str = EMBEDDING) -> DenseLayer:
    """The layer of a module.

    Args:
        width: the width of the embeddings that the layer reads.
        writes: the library's name of what the layer writes.

    Raises:
        InputError: a file is missing or damaged, the weights are pickled without permission or of another width, or the
            activation is not supported.
    """
    file = folder / CONFIG
    config = read_object(file, required=True)
    activation = _activation(file, config, writes)
    tensors = _tensors(folder, allow_pickle)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    rows, is_residual = next(iter(shapes.get(_WEIGHT, ())), 0), bool(config.get("use_residual", False))
    needed: dict[str, tuple[int, ...]] = dict.fromkeys(
        (_WEIGHT, *([_RESIDUAL] if is_residual and rows != width else ())), (rows, width)
    )
    if shapes not in (needed, {**needed, _BIAS: (rows,)}):
        raise _mismatch(folder, tensors, f"{' and '.join(needed)} [width, {width}], with {_BIAS} [width] or without,")
    weight, residual, bias = (tensors[name].float() if name in tensors else None for name in _DENSE_TENSORS)
    assert weight is not None
    layer = DenseLayer(weight, bias, activation, is_residual=is_residual, residual=residual)
    check_finite(folder, layer)
    return layer


def _load_norm_layer(folder: Path, width: int, *, allow_pickle: bool) -> NormLayer:
    """The layer of a module that normalises embeddings; see `load_dense_layer`."""
    tensors = _tensors(folder, allow_pickle)
    weight, bias = tensors.get(_NORM_WEIGHT), tensors.get(_NORM_BIAS)
    if weight is None or bias is None or weight.shape != (width,) or bias.shape != (width,):
        raise _mismatch(folder, tensors, f"{_NORM_WEIGHT} and {_NORM_BIAS} [{width}]")
    layer = NormLayer(weight.float(), bias.float())
    check_finite(folder, layer)
    return layer


def save_module_layers(model: PreTrainedModel, sentence: SentenceModules | None, out: Path) -> None:
    """Write the layers after the pooling of an encoder, with modules of its folder, or of a reranker."""
    if isinstance(model, SentenceEncoder) and sentence is not None:
        save_layers(model.dense_layers, [out / path for path in sentence.dense])
    if isinstance(model, ModuleReranker):
        save_layers(model.layers, [out / path for path in model.folders])


def save_layers(layers: Iterable[DenseLayer | NormLayer], folders: Iterable[Path]) -> None:
    """Write the weights of each layer into the folder of its module, beside a copy of its `config.json`."""
    for layer, folder in zip(layers, folders, strict=True):
        tensors: dict[str, Tensor | None]
        if isinstance(layer, NormLayer):
            tensors = {_NORM_WEIGHT: layer.weight, _NORM_BIAS: layer.bias}
        else:
            tensors = {_WEIGHT: layer.weight, _BIAS: layer.bias, _RESIDUAL: layer.residual}
        contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}
        save_file(contents, folder / SAFE_WEIGHTS)


def _activation(file: Path, config: Mapping[str, object], writes: str) -> str:
    """The name of the activation, the last part of the path of a class of PyTorch."""
    for key, name in (("module_input_name", EMBEDDING), ("module_output_name", writes)):
        value = config.get(key) or EMBEDDING
        if value != name:
            text = f"the layer does not map embeddings to {writes} ({key} is {value!r}); use a model whose layers do"
            raise _unsupported(file, key, value, text)
    path = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if not isinstance(path, str):
        raise invalid_entry(file, "activation_function", path, "is not the name of a class")
    package, _, name = path.rpartition(".")
    if name not in ACTIVATIONS or not f"{package}.".startswith("torch.nn."):
        supported = ", ".join(ACTIVATIONS)
        text = f"the activation {path} (activation_function) is not supported; use one of torch.nn: {supported}"
        raise _unsupported(file, "activation_function", path, text)
    return name


def _tensors(folder: Path, allow_pickle: bool) -> dict[str, Tensor]:
    """The tensors of a module by name."""
    pickled = check_weight_files(folder, {}, allow_pickle).pickled
    file = folder / (PICKLED_WEIGHTS if pickled else SAFE_WEIGHTS)
    if not file.is_file():
        raise _mismatch(folder, {}, f"one file, {file.name},")
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True) if pickled else load_file(file)
    except Exception as error:  # a damaged pickle raises any error
        raise damaged(file, error) from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise damaged(file, ValueError("no tensors by name"))
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _unsupported(file: Path, name: str, value: object, problem: str) -> InputError:
    """The error of a value that the library writes, and that cannot be used here; the problem says what to use."""
    return InputError.of_file(file, problem, ErrorCode.UNSUPPORTED_MODEL, field=name, value=value)


def _mismatch(folder: Path, tensors: Mapping[str, Tensor], expected: str) -> InputError:
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    text = f"the weights are {shapes or 'missing'}, where {expected} is needed; {_SAVE}"
    return InputError.of_file(folder, text, ErrorCode.FILE_MISMATCH)
