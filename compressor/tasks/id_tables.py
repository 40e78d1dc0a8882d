"""The tables of a model that are indexed by ids, and the check that every id of encoded rows has a row there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, InputError, RowError
from compressor.model_folder.example_inputs import token_limit
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.base import Task
from compressor.tasks.forwards import IGNORED, LABELS

_TOKENS, _TARGET_TOKENS, _TYPES = "input_ids", "decoder_input_ids", "token_type_ids"
_POSITION_TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
"""Names of the modules that families look positions up with."""
_CHUNK_ROWS = 10_000
"""Rows whose ids are compared at once."""


@dataclass(frozen=True)
class IdTables:
    """The sizes of a model's tables; inputs that no table is known for are not checked.

    Attributes:
        sizes: name of an input, or of the labels of a language model -> number of ids that its table holds.
        positions: name of an input -> number of positions that the model has for it.
        tokenizer: names the tokens of ids in error messages; None: there is none.
    """

    sizes: Mapping[str, int]
    positions: Mapping[str, int]
    tokenizer: Any = None

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: Any) -> IdTables:
        """The tables of a model, read from its modules."""
        types = (_rows_of(module) for path, module in model.named_modules() if path.endswith("token_type_embeddings"))
        sizes = {
            _TOKENS: _table_size(model, "get_encoder" if model.config.is_encoder_decoder else None),
            _TARGET_TOKENS: _table_size(model, "get_decoder") if model.config.is_encoder_decoder else None,
            _TYPES: min((size for size in types if size is not None), default=None),
        }
        head = model.get_output_embeddings()
        if isinstance(head, nn.Linear):  # labels are shifted to the inputs of a decoder
            sizes[LABELS] = min(filter(None, (head.out_features, sizes[_TARGET_TOKENS])))
        positions = _position_limits(model)
        if (limit := token_limit(model)) is not None:
            positions[_TOKENS] = min(limit, positions.get(_TOKENS, limit))
        return cls({name: size for name, size in sizes.items() if size is not None}, positions, tokenizer)

    def check(self, task: Task, encoded: Dataset, rows: Dataset, source: str) -> None:
        """Compare the ids and lengths of encoded rows, and of their padding, with the tables.

        Args:
            task: the task that encoded the rows.
            encoded: the encoded rows.
            rows: the rows as they were read.
            source: name of the rows in error messages.

        Raises:
            InputError: an id or a position has no row in its table; the message names the row and the token.
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
        """Check padding and positions in a batch of the longest and the shortest row."""
        extremes = _extreme_rows(encoded)
        batch = task.collate([encoded[index] for index in extremes])
        if not isinstance(batch, Mapping):
            raise task.returns_wrong("collate", "a dict of tensors")
        for name, array in batch.items():
            size, limit = self.sizes.get(name) if name != LABELS else None, self.positions.get(name)
            if limit is not None and array.ndim and array.shape[-1] > limit:
                raise RowError.of(
                    source,
                    extremes[0] + 1,
                    f"{name} has {array.shape[-1]} positions, the model has {limit}; cut rows (--max-length {limit})",
                    code=ErrorCode.TOO_LONG,
                    input=name,
                    value=int(array.shape[-1]),
                    size=limit,
                )
            if size is not None and array.numel() and (int(array.max()) >= size or int(array.min()) < 0):
                number = int(array.max()) if int(array.max()) >= size else int(array.min())
                raise InputError(
                    f"{source}: {self._named(name, number)} pads or begins {name}, {self._bounds(name)};"
                    f" {self._remedy(name)}",
                    code=ErrorCode.ID_OUTSIDE_TABLE,
                    input=name,
                    id=number,
                    size=size,
                )

    def _id_error(
        self, task: Task, name: str, index: int, number: int, encoded: Dataset, rows: Dataset, source: str
    ) -> InputError:
        """The error of an id; its row is that of the text where rows are joined or left out in encoding."""
        problem = f"{self._named(name, number)} is in {name}, {self._bounds(name)}; {self._remedy(name)}"
        details: dict[str, Any] = {
            "code": ErrorCode.ID_OUTSIDE_TABLE,
            "input": name,
            "id": number,
            "size": self.sizes[name],
        }
        if task.joined_rows == 1 and len(encoded) == len(rows):
            return RowError.of(source, index + 1, problem, **details)
        if name != _TYPES and (row := self._find_row(rows, number)) is not None:
            return RowError.of(source, row, problem, **details)
        return InputError(f"{source}: {problem}", **details)

    def _find_row(self, rows: Dataset, number: int) -> int | None:
        """Number of the first row whose text has a token; None: the tokenizer adds the token."""
        for row, example in enumerate(rows, 1):
            for value in example.values():
                texts = value if isinstance(value, list) else [value]
                with quiet_transformers():
                    if any(
                        number in self.tokenizer(text, add_special_tokens=False)["input_ids"]
                        for text in texts
                        if isinstance(text, str)
                    ):
                        return row
        return None

    def _named(self, name: str, number: int) -> str:
        """An id as error messages name it."""
        if name == _TYPES:
            return f"the token type {number}"
        convert = getattr(self.tokenizer, "convert_ids_to_tokens", None)
        try:
            token = None if convert is None else convert(number)
        except (IndexError, OverflowError, ValueError):  # not even an id of the tokenizer
            token = None
        return f"the id {number}" if token is None else f"the token {token!r:.40} (id {number})"

    def _bounds(self, name: str) -> str:
        table = "token types" if name == _TYPES else "tokens"
        return f"outside of the model's table of {self.sizes[name]} {table}"

    def _remedy(self, name: str) -> str:
        """What mends ids outside of a table: it depends on whether the tokenizer has more tokens than the model."""
        count = len(self.tokenizer) if hasattr(self.tokenizer, "__len__") else 0
        if name == _TYPES:
            return "save the tokenizer that the model was trained with"
        if count <= self.sizes[name]:
            return "give ids of the model's own tokenizer"
        return (
            f"the tokenizer has {count} tokens: save the one that the model was trained with, or resize the table"
            " (model.resize_token_embeddings(len(tokenizer))), fine-tune and save the model"
        )


def _table_size(model: PreTrainedModel, part: str | None) -> int | None:
    """Number of tokens of the table that a model, or a part of it, looks up; None: it has none, or hides it."""
    try:
        owner: Any = model if part is None else getattr(model, part)()
        table = owner.get_input_embeddings()
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return _rows_of(table)


def _rows_of(module: Any) -> int | None:
    """Number of rows of an embedding table, of a class of its own in some families (I-BERT); None: it is none."""
    weight = getattr(module, "weight", None)
    if not hasattr(module, "padding_idx") or not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    return len(weight)


def _position_limits(model: PreTrainedModel) -> dict[str, int]:
    """The most positions of each input that the tables of positions hold.

    RoBERTa and related families begin behind the padding id, BART and OPT behind an offset.
    """
    limits: dict[str, int] = {}
    tables: list[tuple[str, Any]] = list(model.named_modules())
    for path, module in tables:
        rows = _rows_of(module)
        if rows is not None and path.rpartition(".")[2] in _POSITION_TABLES:
            of_decoder = model.config.is_encoder_decoder and "decoder" in path.split(".")
            name = _TARGET_TOKENS if of_decoder else _TOKENS
            first = getattr(module, "offset", None) or (0 if module.padding_idx is None else module.padding_idx + 1)
            limits[name] = min(limits.get(name, rows), rows - int(first))
    return limits


def _first_outside(encoded: Dataset, name: str, size: int) -> tuple[int, int] | None:
    """Index of the first row with an id outside of a table, and that id; -100 stands for no label."""
    start = 0
    for chunk in encoded.select_columns(name).with_format("arrow").iter(batch_size=_CHUNK_ROWS):
        column = chunk.column(0)
        flat = column
        for _ in range(_depth(flat.type)):
            flat = pc.list_flatten(flat)
        if not pa.types.is_integer(flat.type):
            return None
        if name == LABELS:
            flat = flat.filter(pc.not_equal(flat, IGNORED))
        extent = pc.min_max(flat).as_py()
        if extent["min"] is not None and (extent["min"] < 0 or extent["max"] >= size):
            for row, value in enumerate(column.to_pylist()):
                for number in _flatten(value):
                    if not (0 <= number < size or (name == LABELS and number == IGNORED)):
                        return start + row, number
        start += len(column)
    return None


def _depth(kind: pa.DataType) -> int:
    """How deep lists are nested in a column."""
    return 1 + _depth(kind.value_type) if pa.types.is_list(kind) or pa.types.is_large_list(kind) else 0


def _flatten(value: Any) -> Iterator[int]:
    if isinstance(value, Sequence):
        for item in value:
            yield from _flatten(item)
    elif value is not None:
        yield value


def _extreme_rows(encoded: Dataset) -> list[int]:
    """Indices of the longest, the shortest, and the row with the most labels."""
    lengths = np.asarray(encoded["length"][:])
    indices = [int(lengths.argmax()), int(lengths.argmin())]
    if LABELS in encoded.column_names:
        labels = encoded.select_columns(LABELS).with_format("arrow")[:].column(0)
        if pa.types.is_list(labels.type):
            indices.append(int(np.argmax(pc.list_value_length(labels).to_numpy())))
    return list(dict.fromkeys(indices))
