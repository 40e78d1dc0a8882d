"""Words of rows and their tags, lists in columns that are checked row by row; and the entities that tags mark.

A tag is a prefix and a type: `B-PER`. `B` begins an entity, `I` is inside one, `E` ends one, `S` is an entity of one
word, and `O` is outside. The rules read IOB1, IOB2, IOBES and BIOES alike; they are those of conlleval (CoNLL-2000), as
seqeval 1.2 has them in its default mode:

1. `I` or `E` after `B` or `I` of the same type continues the entity.
2. Any other tag but `O` begins an entity; it ends before the next tag that does not continue it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from datasets import ClassLabel, Dataset

from compressor.errors import ErrorCode, RowError
from compressor.tasks.columns import LabelColumn
from compressor.tasks.labels import listed_names

WORD_COLUMNS = ("words", "tokens")
"""Usual names of the column of words."""
TAG_COLUMN = LabelColumn(
    usual=("tags", "ner_tags", "pos_tags", "chunk_tags", "labels", "label"),
    description="tag",
)


def word_column(rows: Dataset, requested: Sequence[str]) -> str | None:
    """The column that holds words, as a list in each row: the requested one, else the first of a usual name.

    Args:
        rows: the rows.
        requested: names from the recipe; empty: the usual names.
    """
    names = requested if len(requested) == 1 else () if requested else WORD_COLUMNS
    return next((name for name in names if name in rows.column_names and hasattr(rows.features[name], "feature")), None)


def words_of(rows: Dataset, column: str, source: str, before: int = 0) -> list[list[str]]:
    """The words of every row.

    Args:
        rows: some rows.
        column: the column of words.
        source: name of the rows in error messages.
        before: number of rows before these.

    Raises:
        InputError: a row has no words, or a word is empty or not a text.
    """
    sentences = []
    for row, words in enumerate(rows[column][:], before + 1):
        if not words:
            raise invalid_row(source, row, column, "has no words; fill it or remove the row")
        for number, word in enumerate(words, 1):
            if not isinstance(word, str) or not word.strip():
                raise invalid_row(source, row, column, f"has no text as word {number}; remove the word and its tag")
        sentences.append(list(words))
    return sentences


class TagIds:
    """Maps tags to the classes of a model.

    Args:
        names: the model's names of its classes, in order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._ids = {name: index for index, name in enumerate(names)}

    def names_of(self, classes: Iterable[int]) -> list[str]:
        """The tags of classes."""
        return [self.names[index] for index in classes]

    def number(self, name: str) -> int | None:
        """The class of a tag; None if the model does not have it."""
        return self._ids.get(name)

    def of(
        self, rows: Dataset, column: str, words: Sequence[Sequence[str]], source: str, before: int
    ) -> list[list[int]]:
        """The classes of the tags of every row, as many as it has words.

        Tags are names of classes, or their numbers; numbers of a column with names (`ClassLabel`) are read as names.

        Args:
            rows: some rows.
            column: the column of tags.
            words: the words of each row.
            source: name of the rows in error messages.
            before: number of rows before these.

        Raises:
            InputError: a row has no tags or more or fewer than words, or a tag is not one of the model's.
        """
        convert = self._conversion(rows, column)
        classes = []
        for row, (tags, sentence) in enumerate(zip(rows[column][:], words, strict=True), before + 1):
            if tags is None:
                raise invalid_row(source, row, column, "is missing; fill it or remove the row")
            if not isinstance(tags, list):
                raise invalid_row(source, row, column, "is not a list of tags; give one tag for each word")
            if len(tags) != len(sentence):
                problem = f"has {len(tags)} tags for {len(sentence)} words; give one for each word"
                raise invalid_row(source, row, column, problem)
            classes.append([self._class(convert(tag), row, column, source) for tag in tags])
        return classes

    def _conversion(self, rows: Dataset, column: str) -> Callable[[Any], Any]:
        """The conversion of tags as they are stored: the numbers of a `ClassLabel` become names."""
        feature = getattr(rows.features[column], "feature", None)
        if not isinstance(feature, ClassLabel) or not set(feature.names) & self._ids.keys():
            return lambda tag: tag
        names: Mapping[int, str] = dict(enumerate(feature.names))
        return lambda tag: names.get(tag, tag)

    def _class(self, tag: Any, row: int, column: str, source: str) -> int:
        number = self._ids.get(tag) if isinstance(tag, str) else tag
        if type(number) is int and 0 <= number < len(self.names):
            return number
        raise RowError.of(
            source,
            row,
            f"{column!r} has the tag {tag!r}, which is not among the model's ({listed_names(self.names)}; id2label in"
            " its config.json); correct the tag or remove the row",
            code=ErrorCode.LABEL_MISMATCH,
            column=column,
            value=tag,
            labels=self.names,
        )


def first_pieces(encoding: Any, words: int) -> tuple[dict[int, int], list[int]]:
    """The position of the first piece of each word, and the words that have none at all.

    Words beyond the maximum row length have no position, but pieces.

    Args:
        encoding: an encoding of the library tokenizers, with what was cut off.
        words: number of words of the row.
    """
    positions: dict[int, int] = {}
    for position, word in enumerate(encoding.word_ids):
        if word is not None:
            positions.setdefault(word, position)
    cut = {word for rest in encoding.overflowing for word in rest.word_ids}
    return positions, [word for word in range(words) if word not in positions and word not in cut]


def decoded_words(ids: Sequence[int], starts: Sequence[int], special: Collection[int], tokenizer: Any) -> list[str]:
    """The words of an encoded row as text, each from its first piece to that of the next.

    Args:
        ids: the tokens of the row.
        starts: the position of the first piece of each word.
        special: tokens that are left out behind a first piece, as at the end of the row.
        tokenizer: decodes the pieces.
    """
    ends = [*starts[1:], len(ids)]
    pieces = [
        [ids[start], *(token for token in ids[start + 1 : end] if token not in special)]
        for start, end in zip(starts, ends, strict=True)
    ]
    return [tokenizer.decode(word).strip() for word in pieces]


def with_spaces(words: Sequence[str]) -> list[str]:
    """Words with the spaces before them, as in a text, where some tokenizers take a space for a part of the word."""
    return [word if number == 0 else f" {word}" for number, word in enumerate(words)]


def invalid_row(source: str, row: int, column: str, problem: str) -> RowError:
    """The error of a row whose column cannot be read.

    Args:
        source: name of the rows in error messages.
        row: number of the row, counted from 1.
        column: name of the column.
        problem: what is wrong with its value and how to correct it; follows the column's name.
    """
    return RowError.of(source, row, f"{column!r} {problem}", column=column)


_OUTSIDE = "O"
_PREFIXES = frozenset("BIES")


class Entity(NamedTuple):
    """An entity.

    Attributes:
        type: its type, e.g. `PER`.
        start: index of its first tag.
        end: index after its last tag.
    """

    type: str
    start: int
    end: int


def is_entity_tag(tag: str) -> bool:
    """Whether a tag is `O`, or a prefix with or without a type: `B-PER`, `B`."""
    prefix, dash, _ = tag.partition("-")
    return prefix in _PREFIXES or (prefix == _OUTSIDE and not dash)


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence, in order.

    Args:
        tags: one for each word; see `is_entity_tag`.
    """
    entities = []
    start, previous_prefix, previous_type = 0, _OUTSIDE, ""
    for index, tag in enumerate((*tags, _OUTSIDE)):
        prefix, _, entity_type = tag.partition("-")
        if prefix in ("I", "E") and previous_prefix in ("B", "I") and entity_type == previous_type:  # rule 1
            previous_prefix = prefix
            continue
        if previous_prefix != _OUTSIDE:  # rule 2
            entities.append(Entity(previous_type, start, index))
        start, previous_prefix, previous_type = index, prefix, entity_type
    return entities


def entity_counts(predicted: Sequence[str], expected: Sequence[str]) -> tuple[int, int, int]:
    """Numbers of entities of a sentence that are predicted correctly, predicted, and expected.

    An entity is correct if its type and both bounds are.
    """
    predictions, entities = set(entities_of(predicted)), set(entities_of(expected))
    return len(predictions & entities), len(predictions), len(entities)


def entity_f1(statistics: np.ndarray) -> float:
    """F1 over all entities (micro average) from `entity_counts` of each row `[rows, 3]`; 0 without any entity."""
    correct, predicted, expected = statistics.sum(axis=0)
    return float(2 * correct / (predicted + expected)) if predicted + expected else 0.0
