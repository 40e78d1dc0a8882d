"""Real inputs for a served model: texts, encoded by the tokenizer of a folder, and trial inputs for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from compressor.errors import ErrorCode, InputError
from compressor.targets import Feeds
from compressor.targets.example_rows import read_example_rows
from compressor.targets.tensor_specs import TensorSpec
from compressor.targets.trial_inputs import id_limits, require_ids, trial_feeds

SENTENCE = "The film was not at all what the reviews had promised, and it was all the better for it."


@dataclass(frozen=True)
class Rows:
    """Rows for a served model.

    Attributes:
        feeds: for each row, input name -> array `[batch, ...]`.
        random: names of the inputs that neither a text nor an image nor the graph's example rows provide.
    """

    feeds: tuple[Feeds, ...]
    random: tuple[str, ...]


def real_rows(
    folder: Path,
    model: ir.Model,
    inputs: Sequence[TensorSpec],
    texts: Sequence[tuple[str, ...]] = ((SENTENCE,),),
    *,
    shortest: int = 1,
    longest: int = 128,
) -> Rows:
    """A row for each text, tokenized by the folder's tokenizer; a sentence encoder has a row for each text of a pair.

    Args:
        folder: holds the tokenizer, if there is one.
        model: the graph, which determines the valid values of random inputs.
        texts: for each row a text, or a pair of texts.
        shortest: minimum tokens of a row; shorter ones are padded.
        longest: maximum tokens of a row; longer ones are cut.

    Raises:
        InputError: the tokenizer cannot be read, or a text has no token, or a token outside of the graph's embedding
            table.
    """
    from compressor.model_folder.sentence_texts import read_sentence_texts
    from compressor.tasks.raw_texts import model_texts, tokenize, tokenizer_of

    tokenizer = tokenizer_of(folder) if any(tensor.name == "input_ids" for tensor in inputs) else None
    if tokenizer is None:
        return completed_rows([{} for _ in texts], model, inputs, longest)
    sentence, encoded, limits = read_sentence_texts(folder), [], id_limits(model)
    for text in model_texts(texts, sentence):
        tokens = tokenize(tokenizer, [text], sentence, shortest=shortest, longest=longest)
        if not any(tokens["attention_mask"][0]):
            problem = f"{text[0]!r}: the tokenizer makes no token of this text; remove the row"
            raise InputError(problem, code=ErrorCode.INVALID_ROWS, value=text[0])
        encoded.append({name: np.array(values) for name, values in tokens.items()})
        require_ids(encoded[-1], limits, f"{text[0]!r:.60}")
    return completed_rows(encoded, model, inputs, longest)


def completed_rows(
    encoded: Sequence[dict[str, np.ndarray]], model: ir.Model, inputs: Sequence[TensorSpec], longest: int
) -> Rows:
    """Rows with trial inputs in place of missing ones, repeated where the graph fixes a batch size.

    Args:
        encoded: for each row the inputs that are known, `[1, ...]` each; the others are those of the example rows that
            the graph carries, else random.
        longest: size of free axes of a row without ids.
    """
    batch = next((tensor.dims[0] for tensor in inputs if tensor.dims and not tensor.has_batch), 1)
    rows = []
    for index, tokens in enumerate(encoded):
        seq = tokens["input_ids"].shape[1] if "input_ids" in tokens else longest
        arrays = trial_feeds(model, batch, seq, seed=index)
        arrays |= {name: np.repeat(value, batch, axis=0) for name, value in tokens.items()}
        rows.append({tensor.name: arrays[tensor.name].astype(tensor.numpy) for tensor in inputs})
    example = read_example_rows(model)
    provided = {*encoded[0], *(example.inputs if example is not None else ())}
    return Rows(tuple(rows), tuple(tensor.name for tensor in inputs if tensor.name not in provided))
