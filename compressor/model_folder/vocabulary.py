"""The ids that a model reads: those of ordinary tokens, and those with a meaning of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from compressor.errors import ErrorCode, InputError
from compressor.model_folder.folder import ModelFolder
from compressor.models.text_config import text_config


def text_tokenizer(folder: ModelFolder) -> Any:
    """The tokenizer of a folder, which a processor of several inputs contains; None, or another processor, without."""
    return getattr(folder.processor, "tokenizer", folder.processor)


def marker_ids(config: PretrainedConfig, tokenizer: Any) -> frozenset[int]:
    """Ids of a configuration and a tokenizer that texts do not consist of, because they have meanings of their own."""
    values = [value for name, value in config.to_dict().items() if name.endswith(("_token_id", "_token_index"))]
    ids = [item for value in values for item in (value if isinstance(value, list) else [value])]
    added = getattr(tokenizer, "added_tokens_decoder", None)
    ids += [*getattr(tokenizer, "all_special_ids", ()), *(added if isinstance(added, Mapping) else ())]
    return frozenset(item for item in ids if isinstance(item, int))


def ordinary_ids(config: PretrainedConfig, size: int, tokenizer: Any) -> np.ndarray:
    """Ids of tokens without a meaning of their own, which texts consist of; all where the vocabulary has no others.

    Args:
        config: the configuration.
        size: number of ids that the model reads.
        tokenizer: the tokenizer, which may have fewer ids, or None.
    """
    known = len(tokenizer) if hasattr(tokenizer, "convert_ids_to_tokens") else size
    ordinary = np.setdiff1d(np.arange(min(size, known)), list(marker_ids(config, tokenizer)))
    return ordinary if len(ordinary) else np.arange(size)


def vocabulary_size(config: PretrainedConfig, model: PreTrainedModel) -> int:
    """Number of ids that a model reads; that of the decoder in a configuration of two parts.

    Where the configuration has none, it is the size of the first table of embeddings.

    Raises:
        InputError: the model has no embeddings.
    """
    for part in (config, config.get_text_config(decoder=True), text_config(config)):
        size = getattr(part, "vocab_size", None)
        if isinstance(size, int) and size > 0:
            return size
    table = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if table is not None:
        return table.num_embeddings
    raise InputError(
        f"{config.model_type}: the configuration has no vocab_size, from which ids could be drawn; give inputs that the"
        " model runs on (--example-inputs FILE.npz)",
        code=ErrorCode.UNSUPPORTED_MODEL,
        family=config.model_type,
    )


def special_id(config: PretrainedConfig, tokenizer: Any, size: int, *names: str) -> int | None:
    """The id of the first of `names` that the tokenizer has, else the first that the configuration has.

    Args:
        config: the configuration.
        tokenizer: the tokenizer, or None.
        size: number of ids.
        *names: `bos`, `eos`, ...
    """
    for holder in (tokenizer, config):
        for name in names:
            value = getattr(holder, f"{name}_token_id", None)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and 0 <= value < size:
                return value
    return None
