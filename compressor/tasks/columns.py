"""Which columns hold the text and the label: as named in the recipe, else by the names that data sets use."""

from __future__ import annotations

import re
from collections.abc import Sequence

from datasets import Dataset, Value

from compressor.errors import InputError

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
_SINGLE = ("sentence", "text", "content", "review", "document", "question", "sentence1")
_TRANSLATIONS = (("source", "target"), ("src", "tgt"), ("src", "trg"), ("source_text", "target_text"))
_QUESTIONS = (("question", "context"), ("question", "passage"), ("question", "paragraph"), ("query", "context"))
_LANGUAGE = re.compile(r"[a-z]{2}([-_][A-Za-z]{2,4})?")
"""A column named by its language: `de`, `pt_BR`."""
_LABELS = ("label", "labels", "score", "target", "class", "similarity", "stars", "rating")


def text_columns(rows: Dataset, wanted: Sequence[str], source: str) -> tuple[str, ...]:
    """One or two columns of text, in the order in which the model reads them.

    Raises:
        InputError: a named column is missing, holds no text, or no usual name is there.
    """
    found = tuple(wanted) or _usual_texts(rows.column_names)
    if not found:
        raise InputError(f"{source}: no column of text among {_listed(rows)}; name it (--text-columns)")
    if len(found) > 2:
        raise InputError(f"{source}: {len(found)} text columns were named, a model reads one or two; name fewer")
    for name in found:
        _check_text(rows, name, source)
    return found


def pair_columns(rows: Dataset, wanted: Sequence[str], source: str) -> tuple[str, str]:
    """The columns of source and target: as named, else by usual names, else the two that languages name, in order.

    Raises:
        InputError: not two columns were named, one is missing or holds no text, or there is no usual pair.
    """
    languages = [name for name in rows.column_names if _LANGUAGE.fullmatch(name) and _is_text(rows, name)]
    usual = [pair for pair in _TRANSLATIONS if set(pair) <= set(rows.column_names)]
    found = tuple(wanted) or (usual[0] if usual else tuple(languages))
    if len(found) != 2 or len(set(found)) != 2:
        if wanted:
            given = ",".join(wanted)
            raise InputError(f"--text-columns {given}: a translation has two columns; name source and target, as de,en")
        raise InputError(
            f"{source}: no pair of source and target among {_listed(rows)}; name both (--text-columns de,en)"
        )
    for name in found:
        _check_filled(rows, name, source)
    return found[0], found[1]


def question_columns(rows: Dataset, wanted: Sequence[str], source: str) -> tuple[str, str]:
    """The columns of the question and of the text that it is asked about: as named, else by usual names.

    Raises:
        InputError: not two columns were named, one is missing or holds no text, or there is no usual pair.
    """
    if wanted and (len(wanted) != 2 or len(set(wanted)) != 2):
        given = ",".join(wanted)
        raise InputError(f"--text-columns {given}: name two, the question's and the text's, as question,context")
    usual = (pair for pair in _QUESTIONS if set(pair) <= set(rows.column_names))
    found = tuple(wanted) or next(usual, ())
    if not found:
        raise InputError(
            f"{source}: no question and context among {_listed(rows)}; name both (--text-columns question,context)"
        )
    for name in found:
        _check_filled(rows, name, source)
    return found[0], found[1]


def answers_column(rows: Dataset, wanted: str | None, source: str) -> str:
    """The column of the answers.

    Raises:
        InputError: the named column is missing, or no usual name is there.
    """
    if wanted is not None:
        _must_have(rows, wanted, source, "--label-column")
        return wanted
    for name in ("answers", "answer"):
        if name in rows.column_names:
            return name
    raise InputError(f"{source}: no answers among {_listed(rows)}; add `answers` or name them (--label-column)")


def text_column(rows: Dataset, wanted: Sequence[str], source: str) -> str:
    """The one column of text that a language model reads.

    Raises:
        InputError: there are two, a named one is missing or holds no text, or no usual name is there.
    """
    names = text_columns(rows, wanted, source)
    if len(names) != 1:
        raise InputError(f"{source}: language models read one column, not {len(names)}; name it (--text-columns)")
    return names[0]


def label_column(rows: Dataset, wanted: str | None, source: str) -> str:
    """The column of the label.

    Raises:
        InputError: the named column is missing, or no usual name is there.
    """
    if wanted is not None:
        _must_have(rows, wanted, source, "--label-column")
        return wanted
    for name in _LABELS:
        if name in rows.column_names:
            return name
    raise InputError(f"{source}: no label column among {_listed(rows)}; add `label` or name it (--label-column)")


def _usual_texts(names: Sequence[str]) -> tuple[str, ...]:
    for pair in _PAIRS:
        if all(name in names for name in pair):
            return pair
    return next(((name,) for name in _SINGLE if name in names), ())


def _check_text(rows: Dataset, name: str, source: str) -> None:
    _must_have(rows, name, source, "--text-columns")
    if not _is_text(rows, name):
        raise InputError(f"{source}: column {name!r} does not hold text; name one that does (--text-columns)")
    empty = next((index for index, value in enumerate(rows[name]) if value is None), None)
    if empty is not None:
        raise InputError(f"{source}: row {empty + 1} has no {name!r}; fill it or leave the row out")


def _check_filled(rows: Dataset, name: str, source: str) -> None:
    _check_text(rows, name, source)
    empty = next((index for index, value in enumerate(rows[name]) if not value.strip()), None)
    if empty is not None:
        raise InputError(f"{source}: row {empty + 1} has an empty {name!r}; fill it or leave the row out")


def _is_text(rows: Dataset, name: str) -> bool:
    return rows.features[name] in (Value("string"), Value("large_string"))


def _must_have(rows: Dataset, name: str, source: str, flag: str) -> None:
    if name not in rows.column_names:
        raise InputError(f"{source}: no column {name!r} among {_listed(rows)}; name one of these ({flag})")


def _listed(rows: Dataset) -> str:
    # A quoted name may hold line breaks; an error is one line.
    return ", ".join(" ".join(name.split()) for name in rows.column_names[:12]) or "none"
