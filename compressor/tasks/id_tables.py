"""The sizes of a model's embedding tables, and a check that they contain all ids of examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from compressor.answers import IGNORED, LABELS
from compressor.errors import ErrorCode, InputError, RowError
from compressor.graph.signature import HasSignature
from compressor.model_folder.text_limits import token_limit
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS, _TARGET_TOKENS, _TYPES = "input_ids", "decoder_input_ids", "token_type_ids"
_POSITION_TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
"""Names of modules with embeddings of positions."""
_CHUNK_ROWS = 10_000  # number of examples whose ids are checked at once


@dataclass(frozen=True)
class IdTables:
    """The sizes of a model's embedding tables; inputs whose table is unknown are not checked.

    Attributes:
        sizes: name of an input, or of the labels of a language model -> number of ids in its table.
        positions: name of an input -> its maximum number of positions.
        tokenizer: names the tokens of ids in error messages; may be None.
    """

    sizes: Mapping[str, int]
    positions: Mapping[str, int]
    tokenizer: Any = None

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: Any) -> IdTables:
        """The tables of a model, read from its modules, or from the inputs of a graph."""
        sizes: dict[str, int | None]
        if isinstance(model, HasSignature):
            sizes, positions = {name: spec.ids for name, spec in model.input_specs.items()}, dict[str, int]()
        else:
            sizes, positions = _table_sizes(model), _position_limits(model)
        if (limit := token_limit(model)) is not None:
            positions[_TOKENS] = min(limit, positions.get(_TOKENS, limit))
        return cls({name: size for name, size in sizes.items() if size is not None}, positions, tokenizer)

    def check(self, task: Task, encoded: Dataset, rows: Dataset, source: str) -> None:
        """Compare the ids and lengths of the examples of rows, and of their padding, with the tables.

        Raises:
            InputError: a table does not contain an id or a position; the message names the row and the token.
        """
        if _TOKENS not in encoded.column_names or not len(encoded):
            return
        types = encoded.features.arrow_schema
        for name, size in self.sizes.items():
            if name not in encoded.column_names or _depth(types.field(name).type) != _depth(types.field(_TOKENS).type):
                continue  # labels of another kind than tokens
            if (outside := _first_outside(encoded, name, size)) is not None:
                raise self._id_error(task, name, *outside, encoded, rows, source)
        self._check_batch(task, encoded, source)

    def _check_batch(self, task: Task, encoded: Dataset, source: str) -> None:
        """Check padding and positions of the longest example, the shortest, and that of most labels."""
        lengths = np.asarray(encoded["length"][:])
        extremes = [int(lengths.argmax()), int(lengths.argmin())]
        if LABELS in encoded.column_names:
            labels = encoded.select_columns(LABELS).with_format("arrow")[:].column(0)
            if pa.types.is_list(labels.type):
                extremes.append(int(np.argmax(pc.list_value_length(labels).to_numpy())))
        batch = task.collate([encoded[index] for index in dict.fromkeys(extremes)])
        if not isinstance(batch, Mapping):
            raise task.returns_wrong("collate", "a dict of arrays")
        for name, array in batch.items():
            size, limit = self.sizes.get(name) if name != LABELS else None, self.positions.get(name)
            length = int(array.shape[-1]) if array.ndim else 0
            if limit is not None and length > limit:
                problem = (
                    f"{name} has {length} tokens, the model {limit} positions; truncate rows (--max-length {limit})"
                )
                details = {"input": name, "value": length, "size": limit}
                raise RowError.of(source, extremes[0] + 1, problem, code=ErrorCode.TOO_LONG, **details)
            if size is not None and array.size and (int(array.max()) >= size or int(array.min()) < 0):
                number = int(array.max()) if int(array.max()) >= size else int(array.min())
                text = f"{source}: {self._problem(name, number, 'pads or begins')}"
                raise InputError(text, code=ErrorCode.ID_OUTSIDE_TABLE, input=name, id=number, size=size)

    def _id_error(
        self, task: Task, name: str, index: int, number: int, encoded: Dataset, rows: Dataset, source: str
    ) -> InputError:
        """The error of an id; if the task joins or drops rows, its row is found by its text."""
        problem = self._problem(name, number, "is in")
        code, size = ErrorCode.ID_OUTSIDE_TABLE, self.sizes[name]
        details: dict[str, Any] = {"code": code, "input": name, "id": number, "size": size}
        if task.joined_rows == 1 and len(encoded) == len(rows):
            return RowError.of(source, index + 1, problem, **details)
        if name != _TYPES and (row := self._find_row(rows, number)) is not None:
            return RowError.of(source, row, problem, **details)
        return InputError(f"{source}: {problem}", **details)

    def _find_row(self, rows: Dataset, number: int) -> int | None:
        """Number of the first row whose text has a token; None if the tokenizer adds it."""
        for row, example in enumerate(rows, 1):
            cells = (cell for value in example.values() for cell in (value if isinstance(value, list) else [value]))
            texts = [cell for cell in cells if isinstance(cell, str)]
            with quiet_transformers():
                if any(number in self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts):
                    return row
        return None

    def _problem(self, name: str, number: int, relation: str) -> str:
        size, count = self.sizes[name], len(self.tokenizer) if hasattr(self.tokenizer, "__len__") else 0
        if name == _TYPES:
            remedy = "save the tokenizer that the model was trained with"
            return f"the token type {number} {relation} {name}, outside of the model's table of {size} types; {remedy}"
        convert = getattr(self.tokenizer, "convert_ids_to_tokens", None)
        try:
            token = None if convert is None else convert(number)
        except (IndexError, OverflowError, ValueError):  # not even an id of the tokenizer
            token = None
        named = f"the id {number}" if token is None else f"the token {token!r:.40} (id {number})"
        remedy = (
            f"the tokenizer has {count} tokens: save the one that the model was trained with, or resize the table"
            " (model.resize_token_embeddings(len(tokenizer))), fine-tune and save the model"
        )
        remedy = remedy if count > size else "give ids of the model's own tokenizer"
        return f"{named} {relation} {name}, outside of the model's table of {size} tokens; {remedy}"


def _table_sizes(model: PreTrainedModel) -> dict[str, int | None]:
    """The sizes of the tables of a model by input."""
    types = [_table_length(module) for path, module in model.named_modules() if path.endswith("token_type_embeddings")]
    sizes = {
        _TOKENS: _table_size(model, "get_encoder" if model.config.is_encoder_decoder else None),
        _TARGET_TOKENS: _table_size(model, "get_decoder") if model.config.is_encoder_decoder else None,
        _TYPES: min((size for size in types if size is not None), default=None),
    }
    head: Any = model.get_output_embeddings()
    if isinstance(outputs := getattr(head, "out_features", None), int):  # labels are shifted to the decoder's inputs
        sizes[LABELS] = min(filter(None, (outputs, sizes[_TARGET_TOKENS])))
    return sizes


def _table_size(model: PreTrainedModel, part: str | None) -> int | None:
    """Number of token embeddings of a model, or of a part of it; None if it has or shows none."""
    try:
        owner: Any = model if part is None else getattr(model, part)()
        return _table_length(owner.get_input_embeddings())
    except (AttributeError, NotImplementedError, TypeError):
        return None


def _table_length(module: Any) -> int | None:
    """Size of an embedding table, whose class is not PyTorch's in some families (I-BERT); None for other modules."""
    weight: Any = getattr(module, "weight", None)
    if not hasattr(module, "padding_idx") or getattr(weight, "ndim", None) != 2:
        return None
    return len(weight)


def _position_limits(model: PreTrainedModel) -> dict[str, int]:
    """The maximum number of positions of each input, after the padding id (RoBERTa) or an offset (BART, OPT)."""
    limits: dict[str, int] = {}
    tables: list[tuple[str, Any]] = list(model.named_modules())
    for path, module in tables:
        rows = _table_length(module)
        if rows is not None and path.rpartition(".")[2] in _POSITION_TABLES:
            of_decoder = model.config.is_encoder_decoder and "decoder" in path.split(".")
            name = _TARGET_TOKENS if of_decoder else _TOKENS
            first = getattr(module, "offset", None) or (0 if module.padding_idx is None else module.padding_idx + 1)
            limits[name] = min(limits.get(name, rows), rows - int(first))
    return limits


def _first_outside(encoded: Dataset, name: str, size: int) -> tuple[int, int] | None:
    """Index of the first example with an id outside of a table, and that id; -100 is no label."""
    start = 0
    for chunk in encoded.select_columns(name).with_format("arrow").iter(batch_size=_CHUNK_ROWS):
        flat = chunk.column(0).combine_chunks()
        examples = np.arange(start, start + len(flat))
        start += len(flat)
        for _ in range(_depth(flat.type)):
            examples, flat = examples[pc.list_parent_indices(flat).to_numpy()], pc.list_flatten(flat)
        if not pa.types.is_integer(flat.type):
            return None
        ids = flat.to_numpy(zero_copy_only=False)
        outside = ((ids < 0) | (ids >= size)) & ((ids != IGNORED) | (name != LABELS))
        if outside.any():
            return int(examples[outside.argmax()]), int(ids[outside.argmax()])
    return None


def _depth(kind: pa.DataType) -> int:
    return 1 + _depth(kind.value_type) if pa.types.is_list(kind) or pa.types.is_large_list(kind) else 0
