"""The files by which sentence-transformers describes a reranker that is an encoder, a pooling and a head of layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from compressor.errors import ErrorCode, InputError
from compressor.model_folder.configuration import MODULES, invalid, read_object, unsupported
from compressor.model_folder.dense_layers import EMBEDDING, SCORES, load_dense_layer, load_norm_layer
from compressor.model_folder.sentence_modules import (
    LIBRARY_CONFIG,
    POOLING,
    TEXT_CONFIG,
    TRANSFORMER,
    listed_modules,
    module_folders,
    pooling_of,
    prepare_tokenizer,
    require_inside,
    text_settings,
)
from compressor.models.rerankers import Answers, CausalReranker, HeadLayer, ModuleReranker
from compressor.silence_libraries import one_line

_DENSE, _NORM, _DROPOUT = "Dense", "LayerNorm", "Dropout"
_ANSWERS = "LogitScore"
_LAYERS = (_DENSE, _NORM, _DROPOUT)
_RERANKER = "CrossEncoder"
_EXPECTED = f"{TRANSFORMER}, {POOLING} and a head of {', '.join(_LAYERS)}, whose last {_DENSE} writes {SCORES}"


@dataclass(frozen=True)
class RerankerModules:
    """What follows the encoder of a reranker.

    Attributes:
        pooling: a name in `compressor.models.pooled_encoder.POOLINGS`.
        layers: the class and the folder of each layer of the head, in order; dropout is left out.
        outputs: number of scores.
        max_tokens: maximum number of tokens of a pair; None: that of tokenizer and model.
        answers: for a language model that answers, its tokens and how it reads a pair; None: an encoder with a head.
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
        prepare_tokenizer(path, processor, self.pooling, self.max_tokens)
        if self.answers is not None:
            try:
                return CausalReranker(encoder, self.answers).eval()
            except (ValueError, IndexError, AttributeError) as error:
                raise InputError(
                    f"{path}: {type(encoder).__name__} cannot score pairs by the logits of two tokens"
                    f" ({one_line(error)}); use a reranker with a classifier, or name another task (--task causal-lm)",
                    code=ErrorCode.UNSUPPORTED_MODEL,
                    path=path,
                ) from error
        width: int = encoder.config.get_text_config().hidden_size
        layers: list[HeadLayer] = []
        for number, (name, folder) in enumerate(self.layers, 1):
            if name == _NORM:
                layers.append(load_norm_layer(path / folder, width, allow_pickle=allow_pickle))
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
    names = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if names == [TRANSFORMER, _ANSWERS]:
        return _of_language_model(folder, str(modules[1].get("path", "")))
    if POOLING not in names or not _is_reranker(folder):
        return None
    paths = [str(module.get("path", "")) for module in modules]
    require_inside(folder, paths)
    dense = [path for name, path in zip(names, paths, strict=True) if name == _DENSE]
    if names[:2] != [TRANSFORMER, POOLING] or not set(names[2:]) <= set(_LAYERS) or names[-1] != _DENSE:
        text = f"the modules of the reranker are {', '.join(names)}; use one that consists of {_EXPECTED}"
        raise unsupported(folder / MODULES, "type", ",".join(names), text)
    outputs = read_object(folder / dense[-1] / "config.json", required=True).get("out_features")
    if type(outputs) is not int or outputs < 1:
        raise InputError(
            f"{folder / dense[-1]}: the number of scores (out_features) is {outputs!r}; copy the file again",
            code=ErrorCode.FILE_UNREADABLE,
            path=folder / dense[-1],
            field="out_features",
        )
    settings = text_settings(folder)
    if settings["default_prompt"] is not None and settings["prompts"].get(settings["default_prompt"]):
        text = "the reranker puts a prompt before its texts (default_prompt_name); use one without"
        raise unsupported(folder / LIBRARY_CONFIG, "default_prompt_name", settings["default_prompt"], text)
    layers = tuple((name, path) for name, path in zip(names, paths, strict=True) if name in (_DENSE, _NORM))
    pooling = pooling_of(folder / paths[1] / "config.json")
    return RerankerModules(pooling, layers, outputs, settings["max_tokens"])


def _of_language_model(folder: Path, module: str) -> RerankerModules:
    """The modules of a language model that scores by the logits of answers.

    Raises:
        InputError: a file is missing or damaged.
    """
    require_inside(folder, ["", module])
    file = folder / module / "config.json"
    config = read_object(file, required=True)
    positive, negative = config.get("true_token_id"), config.get("false_token_id")
    if type(positive) is not int or type(negative) not in (int, type(None)):
        raise invalid(file, "true_token_id", (positive, negative), "are not the numbers of two tokens")
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
    configs = (folder / path / "config.json" for path in module_folders(folder))
    return any(read_object(file, required=False).get("module_output_name") == SCORES for file in configs)
