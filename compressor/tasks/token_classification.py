"""Token classification: a tag for each word, such as the named entity that it is a part of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.results import MetricUnit, Note, NoteCode
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.base import Forward
from compressor.tasks.columns import TextColumns
from compressor.tasks.encoding import chunks_of, require_fast_tokenizer
from compressor.tasks.forwards import IGNORED
from compressor.tasks.metrics import Metric, token_accuracy
from compressor.tasks.row_store import RowStore
from compressor.tasks.tagged_words import (
    TAG_COLUMN,
    WORD_COLUMNS,
    TagIds,
    decoded_words,
    entities_of,
    entity_counts,
    entity_f1,
    first_pieces,
    invalid_row,
    is_entity_tag,
    with_spaces,
    word_column,
    words_of,
)
from compressor.tasks.token_labels import TokenLabels, table_of

_F1 = Metric("f1", entity_f1, MetricUnit.POINTS, maximum=1.0)
_ACCURACY = Metric("accuracy", token_accuracy, MetricUnit.POINTS, maximum=1.0)


class TokenClassification(TokenLabels):
    """Tags of words, by the logits at the first piece of each: F1 of entities as seqeval counts them, or accuracy.

    A row holds the words of a sentence, and a tag for each. Rows without tags may hold a plain text instead, all of
    whose tokens count then.

    Args:
        folder: its tokenizer encodes the words, its configuration names the tags.
        request: columns and maximum row length.
        metric: one of `metrics`.

    Raises:
        InputError: the tokenizer does not report the word of a token, entities cannot be told from the names of the
            tags, or the maximum row length leaves no room for text.
    """

    name = "token-classification"
    metrics: ClassVar[tuple[Metric, ...]] = (_F1, _ACCURACY)
    text_columns: ClassVar[TextColumns] = TextColumns(counts=(1,), description="column of words or text")

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        require_fast_tokenizer(folder, "which word a token is a part of")
        super().__init__(folder, request, metric)
        self._special_ids = frozenset(self._tokenizer.all_special_ids) - {self._tokenizer.unk_token_id}
        names: dict[Any, str] = dict(folder.config.id2label or {})
        if sorted(names) != list(range(len(names))):
            raise InputError(
                f"{folder.path}: id2label in config.json numbers its {len(names)} tags {sorted(names)}; number"
                " them from 0 on without gaps",
                code=ErrorCode.LABEL_MISMATCH,
                path=folder.path,
                field="id2label",
            )
        self._tags = TagIds([str(names[index]) for index in sorted(names)])
        invalid = next((name for name in self._tags.names if not is_entity_tag(name)), None)
        if metric == _F1 and invalid is not None:
            raise InputError(
                f"{folder.path}: the tag {invalid!r} (id2label in config.json) is neither O nor begins with B-, I-, E-"
                " or S-, so it is not a part of an entity; correct the names, or score each tag (--metric accuracy)",
                code=ErrorCode.LABEL_MISMATCH,
                path=folder.path,
                field="metric",
                value=invalid,
                labels=self._tags.names,
            )

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Check that there are tags, and note how they are scored.

        Raises:
            InputError: no column holds tags.
        """
        column = TAG_COLUMN.find(rows, self._request.label_column, source)
        scored = "entities are compared by the rules of seqeval's default mode" if self._metric == _F1 else "all count"
        text = f"{column!r} is read at the first piece of each word; {scored}"
        self.notes = (Note(text=text, code=NoteCode.METRIC_SETTINGS),)

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Encode words as tokens, with the class of the tag at the first piece of each word as its label.

        Raises:
            InputError: F1 is scored, and no row has an entity.
        """
        column = TAG_COLUMN.find(rows, self._request.label_column, source)
        encoded = self._encode_words(rows, self._find_words(rows, source), source, column)
        outside = {IGNORED, self._tags.number("O")}
        if self._metric == _F1 and all(outside.issuperset(labels) for labels in encoded["labels"]):
            raise InputError(
                f"{source}: no word within {self._longest} tokens has a tag other than O in {column!r}, so there is no"
                " entity to find; give rows with entities, raise --max-length, or score each tag (--metric accuracy)",
                code=ErrorCode.INVALID_ROWS,
                column=column,
                value="O",
            )
        return encoded

    def encode_unlabelled(self, rows: Dataset, source: str) -> Dataset:
        """Encode words, of which the first pieces count, or plain texts, of which all tokens do; labels are zero."""
        words = word_column(rows, self._request.text_columns)
        return self.encode_texts(rows, source) if words is None else self._encode_words(rows, words, source)

    def label_text(self, ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """The ids, and zero for each but those of special tokens."""
        return ids, [IGNORED if token in self._special_ids else 0 for token in ids]

    def count(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[float]:
        """`entity_counts` of a row, or the numbers of correct tags and of all."""
        predicted = logits.argmax(-1)
        if self._metric == _ACCURACY:
            return (predicted == labels).sum(), len(labels)
        return entity_counts(self._tags.names_of(predicted), self._tags.names_of(labels))

    def answers(self, forward: Forward, examples: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        """The entities that the model finds in each row; for accuracy, the words whose tag is not the label."""
        batch = self.collate(examples)
        del batch[self.label_name]
        rows = zip(examples, forward(batch).argmax(-1), strict=True)
        return [self._describe(example, classes) for example, classes in rows]

    def reference_text(self, example: Mapping[str, Any]) -> str:
        """The entities of a row; empty for accuracy, where answers have the labels beside the tags that differ."""
        return self._describe(example, example["labels"]) if self._metric == _F1 else ""

    def _describe(self, example: Mapping[str, Any], classes: Sequence[int]) -> str:
        """An answer to a row as text, from the class of each token."""
        starts = [position for position, label in enumerate(example["labels"]) if label != IGNORED]
        words = decoded_words(example["input_ids"], starts, self._special_ids, self._tokenizer)
        tags = self._tags.names_of(classes[position] for position in starts)
        if self._metric == _F1:
            spans = [(" ".join(words[entity.start : entity.end]), entity.type) for entity in entities_of(tags)]
            return "; ".join(f"{span} ({kind})" if kind else span for span, kind in spans) or "no entity"
        labels = self._tags.names_of(example["labels"][position] for position in starts)
        rows = zip(words, tags, labels, strict=True)
        wrong = [f"{word} ({tag} instead of {label})" for word, tag, label in rows if tag != label]
        return "; ".join(wrong) or "every tag is right"

    def _find_words(self, rows: Dataset, source: str) -> str:
        """The name of the column of words."""
        column = word_column(rows, self._request.text_columns)
        if column is None:
            requested = self._request.text_columns
            problem = f"{','.join(requested)} does not hold" if requested else "no column holds"
            raise InputError(
                f"{source}: {problem} the words of the tags, as a list in each row, among"
                f" {', '.join(rows.column_names)}; name it (--text-columns {WORD_COLUMNS[0]}), or give a file in the"
                " format of CoNLL (.conll)",
                code=ErrorCode.COLUMN_MISSING,
                field="text_columns",
                value=tuple(requested),
                columns=tuple(rows.column_names),
            )
        return column

    def _encode_words(self, rows: Dataset, column: str, source: str, tags: str | None = None) -> Dataset:
        """The tokens of the words; the labels are the tags of a column, or zero.

        Raises:
            InputError: a word has no piece.
        """
        store, cut = RowStore(), 0
        for before, chunk in chunks_of(rows):
            sentences = words_of(chunk, column, source, before)
            if tags is None:
                classes = [[0] * len(words) for words in sentences]
            else:
                classes = self._tags.of(chunk, tags, sentences, source, before)
            encodings = self._tokenize([with_spaces(words) for words in sentences])
            labels = []
            for row, (encoding, words) in enumerate(zip(encodings, sentences, strict=True)):
                positions, missing = first_pieces(encoding, len(words))
                if missing:
                    problem = f"has no token for word {missing[0] + 1} ({words[missing[0]]!a}); remove it and its tag"
                    raise invalid_row(source, before + row + 1, column, problem)
                cut += len(words) - len(positions)
                labels.append([IGNORED] * len(encoding.ids))
                for word, position in positions.items():
                    labels[-1][position] = classes[row][word]
            store.add(table_of([encoding.ids for encoding in encodings], labels))
        if cut:
            text = f"{source}: {cut} words lie beyond {self._longest} tokens of their row and are not read"
            self.notes = (*self.notes, Note(text=text, code=NoteCode.WORDS_CUT))
        return store.finish()

    def _tokenize(self, sentences: list[list[str]]) -> list[Any]:
        """The encodings of sentences by the library tokenizers, cut at the maximum row length."""
        if not sentences:
            return []
        with quiet_transformers():
            batch = self._tokenizer(sentences, truncation=True, max_length=self._longest, is_split_into_words=True)
        return list(batch.encodings)
