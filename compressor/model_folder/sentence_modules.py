"""The files by which sentence-transformers describes what surrounds an encoder: pooling, normalisation, prompts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from transformers import PreTrainedModel

from compressor.errors import ErrorCode, InputError
from compressor.model_folder.configuration import MODULES, damaged, invalid, read_json, read_object, unsupported
from compressor.model_folder.dense_layers import load_dense_layer
from compressor.models.pooled_encoder import POOLINGS
from compressor.models.sentence_encoder import SentenceEncoder

LIBRARY_CONFIG, TEXT_CONFIG = "config_sentence_transformers.json", "sentence_bert_config.json"
_CLASSIFIER = "ForSequenceClassification"
"""Part of the names of transformers' classes that score texts or pairs, as rerankers do."""
TRANSFORMER, POOLING, _DENSE, _NORMALIZE = "Transformer", "Pooling", "Dense", "Normalize"
_ORDER = re.compile(f"{TRANSFORMER} {POOLING}( {_DENSE})*( {_NORMALIZE})?")
_MODULES = f"{TRANSFORMER}, {POOLING} and, possibly, {_DENSE} and {_NORMALIZE}"
_SAVE = "save the model again with sentence-transformers (SentenceTransformer.save_pretrained)"
_USUAL_PROMPTS = ("query", "document")
"""Names of prompts that the library knows in every folder; they are empty where the folder does not set them."""
_MODE_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of older versions of the library -> name of the pooling."""


@dataclass(frozen=True, kw_only=True)
class SentenceTexts:
    """How the texts of a sentence encoder are prepared for its tokenizer.

    Attributes:
        max_tokens: maximum number of tokens of a text; None: that of tokenizer and model.
        lower_case: whether texts are converted to lower case before the tokenizer.
        prompts: texts that are put before others, by name, e.g. `query`.
        default_prompt: name of the prompt of texts without another; None: there is none.
    """

    max_tokens: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None

    def prepare(self, text: str, *names: str) -> str:
        """The text that the tokenizer gets.

        Args:
            text: a text.
            names: names of the prompt that is put before it, the first that exists; else the default prompt.
        """
        name = next((name for name in (*names, self.default_prompt) if name is not None and name in self.prompts), None)
        prompted = ("" if name is None else self.prompts[name]) + text
        return prompted.lower() if self.lower_case else prompted


@dataclass(frozen=True)
class SentenceModules(SentenceTexts):
    """What surrounds the encoder of a folder of sentence-transformers.

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
        """The encoder of a folder with its pooling and dense layers; the tokenizer gets the folder's maximum length.

        Raises:
            InputError: the first token is pooled, and the tokenizer pads on the left; or a layer cannot be used.
        """
        prepare_tokenizer(path, processor, self.pooling, self.max_tokens)
        model = SentenceEncoder(encoder, self.pooling, normalize=self.normalize, pool_in_graph=pool_in_graph)
        for part in self.dense:
            model.dense.append(load_dense_layer(path / part, model.width, allow_pickle=allow_pickle))
        return model.eval()


def prepare_tokenizer(path: Path, processor: Any, pooling: str, max_tokens: int | None) -> None:
    """Give a tokenizer, if there is one, the maximum length of a folder.

    Raises:
        InputError: the first token is pooled, and the tokenizer pads on the left.
    """
    if pooling == "cls" and getattr(processor, "padding_side", "right") == "left":
        raise InputError(
            f"{path}: the first token is pooled, and the tokenizer pads on the left (padding_side); save the tokenizer"
            " with padding on the right",
            code=ErrorCode.UNSUPPORTED_MODEL,
            path=path,
            field="padding_side",
            value="left",
        )
    if processor is not None and max_tokens is not None:
        processor.model_max_length = min(processor.model_max_length, max_tokens)


def read_sentence_modules(folder: Path) -> SentenceModules:
    """The modules around the encoder of a folder.

    Raises:
        InputError: a file is missing or damaged, or the folder has a module or a pooling that is not supported.
    """
    modules = _supported_modules(folder)
    (_, pooling), *others = modules[1:]
    return SentenceModules(
        pooling=pooling_of(folder / pooling / "config.json"),
        normalize=any(name == _NORMALIZE for name, _ in others),
        dense=tuple(path for name, path in others if name == _DENSE),
        **text_settings(folder),
    )


def read_sentence_texts(folder: Path) -> SentenceTexts | None:
    """How the texts of a folder are prepared, whichever modules follow its pooling; None for other models.

    A reranker of sentence-transformers reads pairs: it has no pooling, is a classifier, or is named a `CrossEncoder`.

    Raises:
        InputError: a file that describes the texts is damaged.
    """
    if POOLING not in (str(module.get("type")).rpartition(".")[2] for module in listed_modules(folder)):
        return None
    classes = read_object(folder / "config.json", required=False).get("architectures")
    library_class = read_object(folder / LIBRARY_CONFIG, required=False).get("model_type", "SentenceTransformer")
    if library_class != "SentenceTransformer" or _CLASSIFIER in str(classes):
        return None
    return SentenceTexts(**text_settings(folder))


def text_settings(folder: Path) -> dict[str, Any]:
    """The attributes of `SentenceTexts` by name.

    Raises:
        InputError: a file is damaged, or a value is not what the library writes.
    """
    settings = read_object(folder / TEXT_CONFIG, required=False)
    prompting = read_object(folder / LIBRARY_CONFIG, required=False)
    max_tokens = settings.get("max_seq_length")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        problem = "is not a positive whole number"
        raise invalid(folder / TEXT_CONFIG, "max_seq_length", max_tokens, problem)
    prompts, default_prompt = _prompts(folder / LIBRARY_CONFIG, prompting)
    return {
        "max_tokens": max_tokens,
        "lower_case": bool(settings.get("do_lower_case", False)),
        "prompts": prompts,
        "default_prompt": default_prompt,
    }


def _prompts(file: Path, config: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """The prompts by name, and the name of the default one; None: there is none.

    Raises:
        InputError: a prompt is no text, or the default one does not exist.
    """
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise invalid(file, "prompts", prompts, "is not an object of names and texts")
    names = tuple(dict.fromkeys((*_USUAL_PROMPTS, *prompts)))
    if default is not None and default not in names:
        raise invalid(file, "default_prompt_name", default, f"is not the name of a prompt ({', '.join(names)})")
    return prompts, default


def module_folders(folder: Path) -> tuple[str, ...]:
    """The paths in a folder of its modules, whichever these are; empty for a folder without modules."""
    paths = [PurePosixPath(str(module["path"])) for module in listed_modules(folder) if "path" in module]
    return tuple(str(path) for path in paths if path.parts and _is_inside(path))


def _is_inside(path: PurePosixPath) -> bool:
    """Whether a path that a model names stays in its folder."""
    return not path.is_absolute() and ".." not in path.parts


def listed_modules(folder: Path) -> list[dict[str, Any]]:
    """The entries of the file of modules; empty where it is missing, damaged or of another program."""
    try:
        modules = read_json(folder / MODULES)
    except InputError:
        return []
    return [module for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []


def _supported_modules(folder: Path) -> list[tuple[str, str]]:
    """The class of each module and its path in the folder, in order."""
    file = folder / MODULES
    if not file.is_file():
        raise InputError(
            f"{folder}: no {MODULES}, which says how tokens are pooled; {_SAVE}",
            code=ErrorCode.FILE_MISSING,
            path=file,
        )
    modules = read_json(file)
    if not isinstance(modules, list) or not all(
        isinstance(module, dict) and isinstance(module.get("type"), str) and isinstance(module.get("path"), str)
        for module in modules
    ):
        raise damaged(file, ValueError("not a list of modules, each with a type and a path"))
    names, paths = [module["type"].rpartition(".")[2] for module in modules], [module["path"] for module in modules]
    unknown = next((name for name in names if name not in (TRANSFORMER, POOLING, _DENSE, _NORMALIZE)), None)
    if unknown is not None:
        text = f"the module {unknown} is not supported; use a model that consists of {_MODULES}"
        raise unsupported(file, "type", unknown, text)
    if not _ORDER.fullmatch(" ".join(names)):
        listed = ", ".join(names)
        text = f"the modules are {listed or 'missing'}; use a model that consists of {_MODULES}, in this order"
        raise unsupported(file, "type", listed, text)
    require_inside(folder, paths)
    return list(zip(names, paths, strict=True))


def require_inside(folder: Path, paths: Sequence[str]) -> None:
    """Raise InputError unless the first of the modules is in the folder itself, and the others are inside of it."""
    file = folder / MODULES
    outside = next((path for path in paths if not _is_inside(PurePosixPath(path))), None)
    if outside is not None:
        raise unsupported(file, "path", outside, f"{outside} is outside of the folder; {_SAVE}")
    if paths[0]:
        text = f"the encoder is in the folder {paths[0]}, not in that of {MODULES}; {_SAVE}"
        raise unsupported(file, "path", paths[0], text)


def pooling_of(file: Path) -> str:
    """The name of the pooling."""
    config = read_object(file, required=True)
    modes = _modes(file, config)
    unknown = next((mode for mode in modes if mode not in POOLINGS), None)
    if unknown is not None:
        text = f"the pooling {unknown} (pooling_mode) is not supported; use one of {', '.join(POOLINGS)}"
        raise unsupported(file, "pooling_mode", unknown, text)
    if len(modes) > 1:
        text = f"the poolings {' and '.join(modes)} are joined (pooling_mode); use a model with one of them"
        raise unsupported(file, "pooling_mode", "+".join(modes), text)
    if not config.get("include_prompt", True):
        text = "tokens of prompts are left out (include_prompt), but the graph does not know them; use a model without"
        raise unsupported(file, "include_prompt", False, text)
    return modes[0]


def _modes(file: Path, config: Mapping[str, Any]) -> list[str]:
    """The names of the poolings that are joined: those of `pooling_mode`, else those of the keys of older versions."""
    flags = {key: value for key, value in config.items() if key.startswith("pooling_mode_")}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise invalid(file, key, value, "is neither true nor false")
        if value and key not in _MODE_FLAGS:
            text = f"the pooling {key} is not supported; use a model with one of {', '.join(_MODE_FLAGS)}"
            raise unsupported(file, key, value, text)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _MODE_FLAGS.items() if flags.get(key)] if flags else ["mean"]
        if not modes:
            raise invalid(file, "pooling_mode", None, f"is missing, and none of {', '.join(flags)} is true")
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or not all(isinstance(mode, str) for mode in modes):
        raise invalid(file, "pooling_mode", modes, "is neither a text nor a list of texts")
    return modes
