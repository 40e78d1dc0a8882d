"""Real inputs of a served model: texts through the tokenizer of its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor.errors import InputError
from compressor.silence_libraries import quiet_transformers
from compressor.targets import Feeds
from compressor.targets.random_inputs import random_feeds
from compressor.targets.tensor_specs import TensorSpec

SENTENCE = ("The film was not at all what the reviews had promised, and it was all the better for it.",)


@dataclass(frozen=True)
class Rows:
    """What `real_rows` made.

    Attributes:
        feeds: one row each, every input with its batch axis.
        drawn: names of the inputs that no text gives: valid, but random.
    """

    feeds: tuple[Feeds, ...]
    drawn: tuple[str, ...]


def real_rows(
    folder: Path,
    model: ir.Model,
    inputs: Sequence[TensorSpec],
    texts: Sequence[tuple[str, ...]] = (SENTENCE,),
    *,
    shortest: int = 1,
    longest: int = 128,
) -> Rows:
    """One row for each text, as the folder's tokenizer makes it.

    Args:
        folder: holds the tokenizer, if there is one.
        model: the graph, which says what values are valid where none are given.
        inputs: what to give.
        texts: one text each, or a pair.
        shortest: tokens of a row at least; it is padded to them.
        longest: tokens at most; the rest is cut.

    Raises:
        InputError: the tokenizer cannot be read, or makes nothing of a text.
    """
    from compressor.tasks.raw_texts import tokenizer_of

    tokenizer = tokenizer_of(folder) if any(tensor.name == "input_ids" for tensor in inputs) else None
    made = [{} if tokenizer is None else _tokens(tokenizer, text, shortest, longest) for text in texts]
    batch = next((tensor.dims[0] for tensor in inputs if tensor.dims and not tensor.has_batch), 1)
    rows = []
    for index, tokens in enumerate(made):
        seq = tokens["input_ids"].shape[1] if tokens else longest
        drawn = random_feeds(model, batch, seq, seed=index)
        given = {name: np.repeat(value, batch, axis=0) for name, value in tokens.items()}
        rows.append({tensor.name: {**drawn, **given}[tensor.name].astype(tensor.numpy) for tensor in inputs})
    return Rows(tuple(rows), tuple(tensor.name for tensor in inputs if tensor.name not in made[0]))


def _tokens(tokenizer: Any, text: tuple[str, ...], shortest: int, longest: int) -> dict[str, np.ndarray]:
    """`input_ids`, `attention_mask` and `token_type_ids`, each `[1, tokens]`."""
    asked = {"truncation": True, "return_tensors": "np", "return_attention_mask": True, "return_token_type_ids": True}
    with quiet_transformers():
        made = tokenizer(*text, max_length=longest, **asked)
        if made["input_ids"].shape[1] < shortest:
            made = tokenizer(*text, max_length=shortest, padding="max_length", **asked)
    if not made["input_ids"].size:
        raise InputError(f"{text[0]!r}: gives no token; leave the row out")
    return dict(made)
