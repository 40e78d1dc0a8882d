"""What encoded rows contain: hashes by which stored results are known, and rows that several splits share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from datasets import Dataset

from compressor.results import Note, NoteCode
from compressor.tasks.run_splits import PURPOSES
from compressor.tasks.splits import Split

_REPEATED = 10
_REPEATED_SHARE = 0.1
"""Number and share of scored rows from which on a note says that they are among the rows of another split too."""


@dataclass(frozen=True)
class Contents:
    """What the encoded rows of one split contain.

    Attributes:
        digest: see `rows_hash`.
        rows: a hash of the tokens of each row, or of the digest of its image; empty for rows of another kind.
    """

    digest: str | None
    rows: Sequence[int]


def rows_hash(examples: Dataset) -> str | None:
    """`sha256:...` of the tokens or images, labels and reference texts of encoded rows; None without rows.

    Rows of a custom task that have neither tokens nor images count with all of their columns.
    """
    return read_contents(examples).digest


def read_contents(examples: Dataset) -> Contents:
    """Read encoded rows once, chunk by chunk."""
    if not len(examples):
        return Contents(None, ())
    digest, rows = hashlib.sha256(), list[int]()
    names = [name for name in ("input_ids", "digest", "labels", "reference") if name in examples.column_names]
    has_inputs = not {"input_ids", "digest"}.isdisjoint(names)  # they are the first
    if not has_inputs:
        return Contents(_hash_of_columns(examples), ())
    for batch in examples.select_columns(names).iter(batch_size=1000):
        for row in zip(*(batch[name] for name in names), strict=True):
            digest.update(repr(row).encode())
            rows.append(hash(repr(row[0])))
    return Contents(f"sha256:{digest.hexdigest()}", rows)


def _hash_of_columns(examples: Dataset) -> str:
    """`sha256:...` of all columns of rows as they are stored, whatever they are decoded to."""
    digest = hashlib.sha256()
    columns = examples.select_columns(sorted(examples.column_names)).with_format("arrow")
    for table in columns.iter(batch_size=64):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.combine_chunks())
        digest.update(sink.getvalue())
    return f"sha256:{digest.hexdigest()}"


def repeated_rows(contents: Mapping[Split, Contents], pairs: Iterable[tuple[Split, Split]]) -> list[Note]:
    """Notes on rows that are scored and repeat many others, as in one file that is named twice.

    Args:
        contents: those of each split.
        pairs: a split that is scored, and one whose rows must not be among it.
    """
    notes = []
    for scored, split in pairs:
        if split not in contents or scored not in contents:
            continue
        rows, known = contents[scored].rows, set(contents[split].rows)
        repeated = sum(content in known for content in rows)
        if rows and repeated >= max(_REPEATED, _REPEATED_SHARE * len(rows)):
            text = (
                f"{repeated} of {len(rows)} {PURPOSES[scored]} rows are among the {PURPOSES[split]} rows too, so that"
                f" they do not show what is lost on new rows; name other rows (--{scored}-data)"
            )
            notes.append(Note(text=text, code=NoteCode.ROWS_REPEATED))
    return notes
