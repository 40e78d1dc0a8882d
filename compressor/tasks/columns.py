"""Find the columns of texts and labels: those that the recipe names, else those with names that are usual."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Value

from compressor.config.values import TABLES
from compressor.errors import ErrorCode, InputError, RowError
from compressor.results import Note, NoteCode

_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("query", "document"),
)
_SINGLES = (("sentence",), ("text",), ("content",), ("review",), ("document",), ("question",), ("sentence1",))
_CHUNK_ROWS = 10_000  # rows whose texts are checked at once
_LISTED = 12  # maximum number of columns that an error message lists
_SENTENCE = 4  # minimum words of a column's name that may be a text
_SAMPLED = 100  # number of rows whose texts are compared in length


@dataclass(frozen=True)
class TextColumns:
    """The columns of text that a task reads.

    Attributes:
        usual: conventions of data sets, each the names of its columns; the first that is present is used.
        counts: numbers of columns that the task can read.
        description: name of the columns in error messages.
        example: a value of `--text-columns` in error messages.
        allows_empty: whether a text may be empty.
        pattern: pattern of the names of columns of text, such as those of languages, that are read without a convention
            if they are as many as the task reads; None: conventions alone.
    """

    usual: tuple[tuple[str, ...], ...] = (*_PAIRS, *_SINGLES)
    counts: tuple[int, ...] = (1, 2)
    description: str = "column of text"
    example: str = "text"
    allows_empty: bool = True
    pattern: str | None = None

    def find(self, rows: Dataset, requested: Sequence[str], source: str) -> tuple[str, ...]:
        """The columns that are `requested`, or else have usual names, in the order in which the model reads them.

        Raises:
            InputError: a named column is missing, no usual name is present, the task reads another number of columns,
                or a column does not hold text.
        """
        names = tuple(requested) or self.find_usual(rows)
        self._check_count(rows, names, requested, source)
        for name in names:
            check_present(rows, name, source, "text_columns")
            if not is_text(rows, name):
                text = f"{source}: column {name!r} does not hold text; name one that does (--text-columns)"
                raise InputError(text, code=ErrorCode.INVALID_ROWS, column=name)
            row = next(_unusable_rows(rows, name, allows_empty=self.allows_empty), None)
            if row is not None:
                raise RowError.of(source, row, f"{name!r} is empty; fill it or remove the row", column=name)
        return names

    def find_usual(self, rows: Dataset) -> tuple[str, ...]:
        """The columns of the first convention that is present, else those of the pattern; empty without either."""
        usual = next((names for names in self.usual if set(names) <= set(rows.column_names)), ())
        if usual or self.pattern is None:
            return usual
        pattern = re.compile(self.pattern, re.DOTALL)  # names may have line breaks
        texts = tuple(name for name in rows.column_names if pattern.fullmatch(name) and is_text(rows, name))
        return texts if len(texts) in self.counts else ()

    def _check_count(self, rows: Dataset, names: Sequence[str], requested: Sequence[str], source: str) -> None:
        """Raise InputError unless the task reads as many distinct columns as `names`."""
        distinct = 1 in self.counts or len(set(names)) == len(names)
        if len(names) in self.counts and distinct:
            return
        expected = " or ".join(map(str, self.counts))
        details = {"field": "text_columns", "columns": tuple(rows.column_names)}
        if requested:
            text = (
                f"{source}: --text-columns {','.join(requested)}: this task reads {expected} columns of text; name"
                f" them, e.g. --text-columns {self.example}"
            )
            raise InputError(text, code=ErrorCode.INVALID_VALUE, value=tuple(requested), **details)
        if names:
            text = (
                f"{source}: this task reads {expected} column of text, the rows have {len(names)}"
                f" ({', '.join(names)}); name it (--text-columns {names[0]})"
            )
            raise InputError(text, code=ErrorCode.MISSING_VALUE, value=tuple(names), **details)
        # Labels are shorter than texts.
        sample = rows[:_SAMPLED]
        texts = [name for name in rows.column_names if is_text(rows, name)]
        lengths = {name: sum(map(len, filter(None, sample[name]))) for name in texts}
        wanted = sorted(lengths, key=lambda name: lengths[name], reverse=True)[: min(self.counts)]
        longest = [name for name in texts if name in wanted]
        example = shlex.quote(" ".join((",".join(longest) or self.example).split()))
        remedy = f"name it (--text-columns {example})"
        if rows.info.builder_name in TABLES and any(len(name.split()) >= _SENTENCE for name in longest):
            remedy += "; if the first line is a row, add a line with names before it instead"
        remedy = _header_doubt(rows) or remedy
        text = f"{source}: no {self.description} among the columns {list_columns(rows)}; {remedy}"
        raise InputError(text, code=ErrorCode.COLUMN_MISSING, **details)


def empty_text_notes(rows: Dataset, names: Sequence[str], source: str) -> tuple[Note, ...]:
    """A note on the number of empty texts in each column, if there are any."""
    counts = {name: sum(1 for _ in _unusable_rows(rows, name, allows_empty=False)) for name in dict.fromkeys(names)}
    empty = " and ".join(f"{count} of {len(rows)} rows in {name!r}" for name, count in counts.items() if count)
    text = f"{source}: the text is empty in {empty}; fill it or remove such rows if they are not meant"
    return (Note(text=text, code=NoteCode.TEXTS_EMPTY),) if empty else ()


@dataclass(frozen=True)
class LabelColumn:
    """The column of labels that a task reads.

    Attributes:
        usual: names that data sets use; the first that is present is used.
        description: name of the column in error messages.
    """

    usual: tuple[str, ...] = ("label", "labels", "score", "target", "class", "similarity", "stars", "rating")
    description: str = "label"

    def find(self, rows: Dataset, requested: str | None, source: str) -> str:
        """The name of the column that the recipe names, or else the first usual name.

        Raises:
            InputError: the requested column is missing, or no usual name is present.
        """
        details = {"field": "label_column", "columns": tuple(rows.column_names)}
        if requested is not None:
            check_present(rows, requested, source, "label_column")
            if (doubt := _header_doubt(rows)) and requested in rows[:_SAMPLED][requested]:
                raise InputError(f"{source}: {doubt}", code=ErrorCode.COLUMN_MISSING, value=requested, **details)
            return requested
        if (usual := next((name for name in self.usual if name in rows.column_names), None)) is not None:
            return usual
        remedy = f"add {self.usual[0]!r}, or name the column (--label-column)"
        text = f"{source}: no column of {self.description}s among {list_columns(rows)}; {_header_doubt(rows) or remedy}"
        raise InputError(text, code=ErrorCode.COLUMN_MISSING, **details)


def _header_doubt(rows: Dataset) -> str:
    """Why the first line of a table seems to be a row, and what to do (see `read_rows`); empty if it names columns."""
    return str(rows.info.description) if rows.info.builder_name in TABLES else ""


def is_text(rows: Dataset, name: str) -> bool:
    """Whether a column holds strings."""
    return rows.features[name] in (Value("string"), Value("large_string"))


def _unusable_rows(rows: Dataset, name: str, *, allows_empty: bool) -> Iterator[int]:
    """Numbers, counted from 1, of the rows without a text; chunks of rows are read one after another."""
    start = 1
    for chunk in rows.select_columns(name).with_format("arrow").iter(batch_size=_CHUNK_ROWS):
        column = chunk.column(0)
        unusable = pc.is_null(column)
        if not allows_empty:
            unusable = pc.or_(unusable, pc.equal(pc.utf8_trim_whitespace(column.fill_null("")), ""))
        yield from (start + np.flatnonzero(unusable)).tolist()
        start += len(column)


def check_present(rows: Dataset, name: str, source: str, field: str) -> None:
    """Raise InputError unless rows have the column that a field of the recipe names."""
    if name not in rows.column_names:
        flag = f"--{field.replace('_', '-')}"
        text = f"{source}: no column {name!r} among {list_columns(rows)}; name one of these ({flag})"
        raise InputError(text, code=ErrorCode.COLUMN_MISSING, field=field, value=name, columns=tuple(rows.column_names))


def list_columns(rows: Dataset) -> str:
    """The first column names for an error message, on one line even if a quoted name has line breaks."""
    return ", ".join(" ".join(name.split()) for name in rows.column_names[:_LISTED]) or "none"
