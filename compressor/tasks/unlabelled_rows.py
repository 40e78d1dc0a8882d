"""Further training rows without labels (`--unlabelled-data`), beside the rows of the task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from datasets.fingerprint import generate_random_fingerprint

from compressor.config.sections import RowsConfig
from compressor.config.values import TABLES
from compressor.errors import ErrorCode, InputError
from compressor.results import Note, NoteCode
from compressor.tasks.base import LABELS, Task
from compressor.tasks.id_tables import IdTables
from compressor.tasks.row_origin import SplitRows
from compressor.tasks.run_splits import SourceRows, encode_rows, select_split


def read_unlabelled(request: RowsConfig, read: Callable[[str], SplitRows]) -> tuple[SourceRows, list[Note]]:
    """The rows of `unlabelled_data`, with a note on splits that are not used.

    The only column of a file, such as the lines of a text, stands for the column of texts, whatever its name.
    """
    source = request.unlabelled_data
    assert source is not None
    named = read(source)
    name, chosen = select_split("train", named, source)
    rows, columns = chosen.rows, request.text_columns
    notes = []
    if len(columns) == len(rows.column_names) == 1 and columns[0] not in rows.column_names:
        if rows.info.builder_name in TABLES:
            text = f"the column {rows.column_names[0]!r:.60} of {source} is read as {columns[0]!r}"
            notes.append(Note(text=text, code=NoteCode.TEXT_COLUMNS))
        rows = rows.rename_column(rows.column_names[0], columns[0])
    if others := [other for other in named if other != name]:
        text = f"of {source}, the split {name!r} is used, and not {', '.join(map(repr, others))}"
        notes.append(Note(text=text, code=NoteCode.SPLIT_UNUSED))
    return SourceRows(rows, chosen.source, chosen.origin), notes


def encode_unlabelled(
    task: Task, request: RowsConfig, rows: SourceRows, train: SourceRows, tables: IdTables
) -> Dataset:
    """The encoded rows, with placeholders for labels.

    Args:
        task: the task.
        request: names the columns.
        rows: the rows to encode.
        train: the training rows beside them; rows of a classification or regression have as many texts as these.
        tables: those of the model, in which every id of the rows must have a row.

    Raises:
        InputError: the rows cannot be encoded, have another number of texts, or the task needs their labels.
    """
    if not request.text_columns:  # requested columns are those of both
        texts, of_train = (task.usual_texts(part.rows) for part in (rows, train))
        if texts and len(texts) != len(of_train):
            raise InputError(
                f"{rows.source}: a row has {_count(texts)} ({', '.join(texts)}), and a training row has"
                f" {_count(of_train)}; give rows of one form, or name the columns of text (--text-columns)",
                code=ErrorCode.FILE_MISMATCH,
                field="text_columns",
                columns=texts,
            )
    try:
        return encode_rows(task, rows, tables, is_labelled=False)
    except InputError as error:
        if error.details.get("field") != "label_column":
            raise
        raise InputError(
            f"{rows.source}: {task.name} encodes rows together with their labels, and there are none; add labels, or"
            " omit these rows (--unlabelled-data)",
            code=error.code,
            field="unlabelled_data",
            source=rows.source,
        ) from error


def join_rows(train: Dataset, further: Dataset, source: str) -> Dataset:
    """Encoded training rows and further ones behind them, in the columns and types of the first.

    Placeholders of another type than labels, such as zero for a list of tags, become the label of the first row.

    Raises:
        InputError: a custom task encodes the two as different columns or types.
    """
    columns, schema = further.with_format("arrow")[:], train.features.arrow_schema
    try:
        if LABELS in schema.names and columns.schema.field(LABELS).type != schema.field(LABELS).type and len(train):
            label = train.select_columns(LABELS).with_format("arrow")[:1].column(0).combine_chunks()
            labels = label.take(pa.array(np.zeros(len(columns), np.int64)))
            columns = columns.set_column(columns.schema.get_field_index(LABELS), LABELS, labels)
        table = columns.select(train.column_names).cast(schema)
    except (KeyError, pa.ArrowException) as error:
        raise InputError(
            f"{source}: the task encodes these rows as {_types(further)}, the training rows as {_types(train)}; let"
            " encode and encode_unlabelled of the task return equal columns",
            code=ErrorCode.FILE_MISMATCH,
            field="unlabelled_data",
            source=source,
        ) from error
    # The fingerprint of the content, which is the default, would take it into memory.
    return concatenate_datasets([train, Dataset(table, fingerprint=generate_random_fingerprint())])


def _count(texts: Sequence[str]) -> str:
    return "1 text" if len(texts) == 1 else f"{len(texts)} texts"


def _types(rows: Dataset) -> str:
    return ", ".join(f"{column.name} ({column.type})" for column in rows.features.arrow_schema)
