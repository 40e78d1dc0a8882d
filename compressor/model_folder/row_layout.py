"""How a row of text is laid out: its markers, such as the end token, and where ordinary tokens stand between them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from compressor.model_folder.folder import ModelFolder
from compressor.model_folder.vocabulary import (
    marker_ids,
    ordinary_ids,
    special_id,
    text_config,
    text_tokenizer,
    vocabulary_size,
)
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
    others = np.setdiff1d(ordinary, list(layout.markers))
    return layout, others if len(others) else ordinary


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
        ids, is_marker = row["input_ids"], np.array(row["special_tokens_mask"], bool)
        if np.count_nonzero(~is_marker) >= len(texts):
            return _layout(ids, row.get("token_type_ids"), is_marker, int(ordinary[number]))
    return None


def rows_layout(batches: Sequence[Mapping[str, Tensor]], folder: ModelFolder) -> ExampleRows | None:
    """The layout that most rows of a task have, with a placeholder for its ordinary tokens.

    Args:
        batches: collated batches, of which the first rows are read.
        folder: its special and added tokens are markers, except that of unknown words.

    Returns:
        One row; None where the batches have no token ids.
    """
    config, tokenizer = text_config(folder.config), text_tokenizer(folder)
    placeholder = int(ordinary_ids(folder.config, vocabulary_size(config, folder.model), tokenizer)[0])
    markers = marker_ids(config, tokenizer) - {getattr(tokenizer, "unk_token_id", None)}
    layouts = [layout for batch in batches if (layout := _layout_of(batch, markers, placeholder)) is not None]
    if not layouts:
        return None
    shapes = [tuple(layout.inputs["input_ids"][0][_is_marker(layout)].tolist()) for layout in layouts]
    (most, _), *_ = Counter(shapes).most_common(1)
    return layouts[shapes.index(most)]


def _is_marker(layout: ExampleRows) -> np.ndarray:
    return np.isin(layout.inputs["input_ids"][0], list(layout.markers))


def _layout_of(batch: Mapping[str, Tensor], markers: frozenset[int], placeholder: int) -> ExampleRows | None:
    """The layout of the first row of a batch."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        return None
    mask, kinds = batch.get("attention_mask"), batch.get("token_type_ids")
    real = slice(None) if mask is None or mask.shape != ids.shape else mask[0].bool().numpy()
    row = ids[0].numpy()[real]
    types = None if kinds is None or kinds.shape != ids.shape else kinds[0].numpy()[real].tolist()
    is_marker = np.isin(row, list(markers))
    return None if is_marker.all() else _layout(row.tolist(), types, is_marker, placeholder)


def _layout(ids: Sequence[int], types: Sequence[int] | None, is_marker: np.ndarray, placeholder: int) -> ExampleRows:
    row = np.where(is_marker, ids, placeholder)
    kinds = np.zeros_like(row) if types is None else np.array(types)
    inputs = {"input_ids": row[None], "attention_mask": np.ones_like(row)[None], "token_type_ids": kinds[None]}
    return ExampleRows(inputs, frozenset(row[is_marker].tolist()) - {placeholder})
