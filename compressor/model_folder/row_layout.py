"""How a row of text is laid out: its markers, such as the end token, and the ids of ordinary tokens between them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from compressor.errors import ErrorCode, InputError
from compressor.model_folder.folder import ModelFolder
from compressor.models.text_config import text_config
from compressor.silence_libraries import quiet_transformers
from compressor.targets.example_rows import ExampleRows

_ATTEMPTS = 16
"""Ordinary tokens of a vocabulary that are tried as a text."""


def row_layout(folder: ModelFolder, *, pair: bool) -> tuple[ExampleRows, np.ndarray]:
    """How a row of text is laid out, with placeholders for its ordinary tokens, and the ids of those.

    Args:
        folder: a loaded folder; its rows are laid out as those of its task, where these are known.
        pair: whether a row is otherwise a pair of texts.
    """
    config, tokenizer = text_config(folder.config), text_tokenizer(folder)
    size = vocabulary_size(config, folder.model)
    ordinary = ordinary_ids(folder.config, size, tokenizer)
    layout = folder.layout or _tokenizer_layout(tokenizer, ordinary, pair=pair)
    if layout is None or (folder.layout is None and not layout.markers):
        first, last = (special_id(config, tokenizer, size, *names) for names in (("bos", "cls"), ("eos", "sep")))
        text, markers = int(ordinary[0]), frozenset(token for token in (first, last) if token is not None)
        ids = np.array([token for token in (first, text, text, last) if token is not None])
        types = (np.arange(len(ids)) >= len(ids) / 2).astype(np.int64)
        row = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": types}
        layout = ExampleRows({name: array[None] for name, array in row.items()}, markers - {text})
    layout = dataclasses.replace(layout, padding=special_id(config, tokenizer, size, "pad") or 0)
    unmarked = np.setdiff1d(ordinary, list(layout.markers))
    return layout, unmarked if len(unmarked) else ordinary


def _tokenizer_layout(tokenizer: Any, ordinary: np.ndarray, *, pair: bool) -> ExampleRows | None:
    """The layout that a tokenizer gives to a text or a pair of texts.

    Args:
        tokenizer: the tokenizer, or None.
        ordinary: ids of ordinary tokens.
        pair: whether the row is a pair.

    Returns:
        One row of ids and token types; None where the tokenizer cannot encode a token of its vocabulary.
    """
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        return None
    for number in np.linspace(len(ordinary) - 1, 0, min(_ATTEMPTS, len(ordinary)), dtype=int):
        try:
            with quiet_transformers():
                text = tokenizer.decode([int(ordinary[number])])
                texts = (text, text) if pair else (text,)
                row = tokenizer(*texts, return_special_tokens_mask=True, return_token_type_ids=True)
        except Exception:  # tokenizers are free-form: a text that one cannot encode can raise any error
            continue
        ids, is_marker = np.array(row["input_ids"]), np.array(row["special_tokens_mask"], bool)
        if np.count_nonzero(~is_marker) >= len(texts):
            types = np.array(row.get("token_type_ids", np.zeros_like(ids)))
            return _layout(ids, types, is_marker, int(ordinary[number]))
    return None


def rows_layout(rows: Iterable[Mapping[str, Any]], folder: ModelFolder) -> ExampleRows | None:
    """The layout that most rows of a task have, with a placeholder for its ordinary tokens.

    Args:
        rows: encoded rows, with their ids as `input_ids`; of a row of several windows or texts, the first is read.
        folder: its special and added tokens are markers, except that of unknown words.

    Returns:
        One row; None where no row has an ordinary token.
    """
    config, tokenizer = text_config(folder.config), text_tokenizer(folder)
    placeholder = int(ordinary_ids(folder.config, vocabulary_size(config, folder.model), tokenizer)[0])
    markers = marker_ids(config, tokenizer) - {getattr(tokenizer, "unk_token_id", None)}
    layouts = []
    for row in rows:
        ids, types = (_first_row(row.get(name)) for name in ("input_ids", "token_type_ids"))
        is_marker = np.isin(ids, list(markers))
        if ids.dtype.kind == "i" and not is_marker.all():
            kinds = types if types.shape == ids.shape else np.zeros_like(ids)
            layouts.append(_layout(ids, kinds, is_marker, placeholder))
    if not layouts:
        return None
    rows_of_ids = [(layout.inputs["input_ids"][0], list(layout.markers)) for layout in layouts]
    shapes = [tuple(ids[np.isin(ids, marked)].tolist()) for ids, marked in rows_of_ids]
    (most, _), *_ = Counter(shapes).most_common(1)
    return layouts[shapes.index(most)]


def _first_row(content: Any) -> np.ndarray:
    """The first list of numbers in a cell; empty where there is none."""
    while isinstance(content, Sequence) and content and isinstance(content[0], Sequence | np.ndarray):
        content = content[0]
    array = np.array([] if content is None else content)
    return array if array.ndim == 1 else array.reshape(-1)


def _layout(ids: np.ndarray, types: np.ndarray, is_marker: np.ndarray, placeholder: int) -> ExampleRows:
    row = np.where(is_marker, ids, placeholder)
    inputs = {"input_ids": row[None], "attention_mask": np.ones_like(row)[None], "token_type_ids": types[None]}
    return ExampleRows(inputs, frozenset(row[is_marker].tolist()) - {placeholder})


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
