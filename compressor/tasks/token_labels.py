"""Tasks that score tokens with a label: tags of words, such as those of named entities, and masked tokens."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import ClassLabel, Dataset

from compressor.answers import IGNORED
from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError, RowError
from compressor.model_folder import ModelFolder
from compressor.results import Note, NoteCode
from compressor.tasks.base import Batch, Forward, Task
from compressor.tasks.columns import LabelColumn, TextColumns
from compressor.tasks.encoding import TextTokenizer, count_cut, encode_chunks, pad, require_fast_tokenizer
from compressor.tasks.labels import listed_names
from compressor.tasks.metrics import TOKEN_ACCURACY, Metric, perplexity, share, token_losses


class TokenLabels(Task):
    """Base class of tasks that score tokens with a label.

    Examples have the columns `input_ids`, `labels` (-100: the token is not scored) and `length`.

    Raises:
        InputError: the maximum length leaves no room for text.
    """

    text_columns: ClassVar[TextColumns] = TextColumns(counts=(1,))

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(metric)
        self._request = request
        self._tokenizer = folder.processor
        self._texts = TextTokenizer(folder, request)

    @abstractmethod
    def label_text(self, ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """The tokens of a plain text as the model reads them, and the label of each."""

    @abstractmethod
    def count(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[float]:
        """Statistics of the scored tokens of an example, from logits `[tokens, classes]` and labels `[tokens]`."""

    def encode_texts(self, rows: Dataset, source: str) -> Dataset:
        """Encode a plain text of each row; rows without a token to score are dropped, which a note says.

        Raises:
            InputError: no row has a token to score.
        """
        (column,) = self.text_columns.find(rows, self._request.text_columns, source)

        def encode(chunk: Dataset, _: int) -> tuple[pa.Table, int]:
            encodings = self._texts(list(chunk[column]))
            examples = [self.label_text(ids) for ids in encodings["input_ids"]]
            scored = [example for example in examples if set(example[1]) - {IGNORED}]
            return table_of(*zip(*scored, strict=True)) if scored else table_of((), ()), count_cut(encodings)

        encoded, cut = encode_chunks(rows, encode)
        if not len(encoded):
            problem = f"{source}: no row has a token that is scored; give rows of text"
            raise InputError(problem, code=ErrorCode.TOO_FEW_ROWS, column=column, rows=0)
        if left_out := len(rows) - len(encoded):
            text = f"{source}: {left_out} of {len(rows)} rows have no token that is scored, and are left out"
            self.note(text, NoteCode.ROWS_LEFT_OUT)
        self.notes = (*self.notes, *self._texts.cut_notes(source, cut, len(rows)))
        return encoded

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Token ids, mask, token types and `labels`, each `[examples, longest]`, padded on the right."""
        batch = self._texts.collate([example["input_ids"] for example in examples])
        return {**batch, self.label_name: pad([example["labels"] for example in examples], IGNORED)}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """`count` of each example, `[examples, k]`, from logits `[examples, position, classes]`."""
        rows = zip(logits, labels, labels != IGNORED, strict=True)
        return np.array([self.count(scores[scored], row[scored]) for scores, row, scored in rows], dtype=np.float64)

    def answer_ids(self, logits: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.asarray(logits.argmax(-1)[batch["attention_mask"] != 0])


def table_of(ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> pa.Table:
    """A table of examples, from the ids and the labels of each."""
    numbers = pa.list_(pa.int64())
    columns = {"input_ids": pa.array(ids, numbers), "labels": pa.array(labels, numbers)}
    return pa.table({**columns, "length": pa.array(map(len, ids), pa.int64())})


WORD_COLUMNS = ("words", "tokens")
"""Usual names of the column of words."""
TAG_COLUMN = LabelColumn(usual=("tags", "ner_tags", "pos_tags", "chunk_tags", "labels", "label"), description="tag")
_OUTSIDE = "O"
_PREFIXES = frozenset("BIES")


def word_column(rows: Dataset, requested: Sequence[str]) -> str | None:
    """The column with a list of words in each row, `requested` by the recipe, or else with a usual name; or None."""
    names = requested if len(requested) == 1 else () if requested else WORD_COLUMNS
    return next((name for name in names if name in rows.column_names and hasattr(rows.features[name], "feature")), None)


def words_of(rows: Dataset, column: str, source: str, before: int = 0) -> list[list[str]]:
    """The words of every row; `before` rows precede these.

    Raises:
        InputError: a row has no words, or a word is empty or not text.
    """
    sentences = rows[column][:]
    for row, words in enumerate(sentences, before + 1):
        if not words:
            raise _invalid_row(source, row, column, "has no words; fill it or remove the row")
        for number, word in enumerate(words, 1):
            if not isinstance(word, str) or not word.strip():
                raise _invalid_row(source, row, column, f"has no text as word {number}; remove the word and its tag")
    return list(map(list, sentences))


def _invalid_row(source: str, row: int, column: str, problem: str, **details: Any) -> RowError:
    return RowError.of(source, row, f"{column!r} {problem}", column=column, **details)


class Entity(NamedTuple):
    """An entity: its type, e.g. `PER`, the index of its first tag, and the index after its last tag."""

    type: str
    start: int
    end: int


def is_entity_tag(tag: str) -> bool:
    """Whether a tag is `O`, or a prefix with or without a type: `B-PER`, `B`."""
    prefix, dash, _ = tag.partition("-")
    return prefix in _PREFIXES or (prefix == _OUTSIDE and not dash)


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence, in order, from the tag of each word (see `is_entity_tag`)."""
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
    """Numbers of correct, predicted and expected entities of a sentence; type and both ends must be correct."""
    predictions, entities = set(entities_of(predicted)), set(entities_of(expected))
    return len(predictions & entities), len(predictions), len(entities)


def entity_f1(statistics: np.ndarray) -> float:
    """F1 over all entities (micro average) from `entity_counts`, `[examples, 3]`; 0 without any entity."""
    correct, predicted, expected = statistics.sum(axis=0)
    return float(2 * correct / (predicted + expected)) if predicted + expected else 0.0


_F1 = share("f1", entity_f1)


class TokenClassification(TokenLabels):
    """Tags of words by the logits at their first tokens, scored by seqeval's F1 of entities, or by accuracy.

    A row holds the words of a sentence, and a tag for each. Rows without tags may hold a plain text instead, of which
    all tokens count.

    Raises:
        InputError: the tokenizer does not report the word of a token, the names of the tags do not mark entities, or
            the maximum length leaves no room for text.
    """

    name = "token-classification"
    metrics: ClassVar[tuple[Metric, ...]] = (_F1, TOKEN_ACCURACY)
    text_columns: ClassVar[TextColumns] = TextColumns(counts=(1,), description="column of words or text")

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        require_fast_tokenizer(folder, "which word a token is a part of")
        super().__init__(folder, request, metric)
        self._special_ids = self._texts.special_ids
        names: dict[Any, str] = dict(folder.config.id2label or {})
        numbers = sorted(names)
        if numbers != list(range(len(names))):
            text = f"{folder.path}: id2label in config.json numbers its tags {numbers}; number them from 0 without gaps"
            raise InputError(text, code=ErrorCode.LABEL_MISMATCH, path=folder.path, field="id2label")
        self._tags = tuple(str(names[index]) for index in numbers)
        self._classes = {tag: index for index, tag in enumerate(self._tags)}
        invalid = next((tag for tag in self._tags if not is_entity_tag(tag)), None)
        if metric == _F1 and invalid is not None:
            text = (
                f"{folder.path}: the tag {invalid!r} (id2label in config.json) is neither O nor begins with B-, I-, E- "
                f"or S-, so it marks no entity; correct the names, or score each tag (--metric accuracy)"
            )
            details = {"path": folder.path, "field": "metric", "value": invalid, "labels": self._tags}
            raise InputError(text, code=ErrorCode.LABEL_MISMATCH, **details)

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Note how tags are scored; raise InputError without a column of tags."""
        column = TAG_COLUMN.find(rows, self._request.label_column, source)
        scored = "entities are compared by the rules of seqeval's default mode" if self._metric == _F1 else "all count"
        text = f"{column!r} is read at the first piece of each word; {scored}"
        self.notes = (Note(text=text, code=NoteCode.METRIC_SETTINGS),)

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Encode words as tokens; the label of a word's first token is the class of its tag.

        Raises:
            InputError: F1 is scored, and no row has an entity.
        """
        column = TAG_COLUMN.find(rows, self._request.label_column, source)
        requested = self._request.text_columns
        words = word_column(rows, requested)
        if words is None:
            problem = f"{','.join(requested)} does not hold" if requested else "no column holds"
            text = (
                f"{source}: {problem} the words of the tags, as a list in each row, among "
                f"{', '.join(rows.column_names)}; name the column (--text-columns {WORD_COLUMNS[0]}), or give a file "
                "in the format of CoNLL (.conll)"
            )
            details = {"field": "text_columns", "value": tuple(requested), "columns": tuple(rows.column_names)}
            raise InputError(text, code=ErrorCode.COLUMN_MISSING, **details)
        encoded = self._encode_words(rows, words, source, column)
        outside = {IGNORED, self._classes.get("O")}
        if self._metric == _F1 and all(outside.issuperset(labels) for labels in encoded["labels"]):
            text = (
                f"{source}: no word within {self._texts.longest} tokens has a tag other than O in {column!r}, so there"
                " is no entity to find; give rows with entities, raise --max-length, or score each tag (--metric"
                " accuracy)"
            )
            raise InputError(text, code=ErrorCode.INVALID_ROWS, column=column, value="O")
        return encoded

    def encode_unlabelled(self, rows: Dataset, source: str) -> Dataset:
        """Encode words, whose first tokens count, or plain texts, of which all tokens count; labels are zero."""
        words = word_column(rows, self._request.text_columns)
        return self.encode_texts(rows, source) if words is None else self._encode_words(rows, words, source)

    def label_text(self, ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """The ids, and zero for each except special tokens."""
        return ids, [IGNORED if token in self._special_ids else 0 for token in ids]

    def labels_of(self, logits: np.ndarray, examples: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        rows = zip(logits.argmax(-1).tolist(), (example["labels"] for example in examples), strict=True)
        return [
            [IGNORED if label == IGNORED else answer for answer, label in zip(classes, labels, strict=False)]
            for classes, labels in rows
        ]

    def count(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[float]:
        """`entity_counts` of an example, or the numbers of correct tags and of all."""
        predicted = logits.argmax(-1)
        if self._metric == TOKEN_ACCURACY:
            return (predicted == labels).sum(), len(labels)
        return entity_counts(*([self._tags[index] for index in classes] for classes in (predicted, labels)))

    def answers(self, forward: Forward, examples: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        """The entities that the model finds in each example; for accuracy, the words whose tag is not the label."""
        classes = self.logits_and_labels(forward, examples)[0].argmax(-1)
        return list(map(self._describe, examples, classes))

    def reference_text(self, example: Mapping[str, Any]) -> str:
        """The entities of an example; empty for accuracy, whose answers contain the labels that differ."""
        return self._describe(example, example["labels"]) if self._metric == _F1 else ""

    def _describe(self, example: Mapping[str, Any], classes: Sequence[int]) -> str:
        starts = [position for position, label in enumerate(example["labels"]) if label != IGNORED]
        ids, ends = example["input_ids"], [*starts[1:], len(example["input_ids"])]
        words = []
        for start, end in zip(starts, ends, strict=True):  # each from its first token to that of the next
            tokens = [ids[start], *(token for token in ids[start + 1 : end] if token not in self._special_ids)]
            words.append(self._tokenizer.decode(tokens).strip())
        tags = [self._tags[classes[position]] for position in starts]
        if self._metric == _F1:
            spans = [(" ".join(words[entity.start : entity.end]), entity.type) for entity in entities_of(tags)]
            return "; ".join(f"{span} ({kind})" if kind else span for span, kind in spans) or "no entity"
        labels = [self._tags[example["labels"][position]] for position in starts]
        rows = zip(words, tags, labels, strict=True)
        wrong = [f"{word} ({tag} instead of {label})" for word, tag, label in rows if tag != label]
        return "; ".join(wrong) or "every tag is right"

    def _encode_words(self, rows: Dataset, column: str, source: str, tags: str | None = None) -> Dataset:
        """The tokens of words, with tags of a column or zero as labels; raise InputError for a word without token."""

        def encode(chunk: Dataset, before: int) -> tuple[pa.Table, int]:
            sentences = words_of(chunk, column, source, before)
            classes = [[0] * len(words) for words in sentences]
            if tags is not None:
                classes = self._classes_of(chunk, tags, sentences, source, before)
            # For some tokenizers, the space before a word is a part of it, as in a text.
            spaced = [[f" {word}" if number else word for number, word in enumerate(words)] for words in sentences]
            encodings = list(self._texts(spaced, is_split_into_words=True).encodings or ())
            labels, cut = list[list[int]](), 0
            for row, (encoding, words) in enumerate(zip(encodings, sentences, strict=True)):
                pieces = [(word, position) for position, word in enumerate(encoding.word_ids) if word is not None]
                positions = dict(reversed(pieces))  # those of first pieces
                cut_words = {word for rest in encoding.overflowing for word in rest.word_ids}
                missing = [word for word in range(len(words)) if word not in positions and word not in cut_words]
                if missing:
                    problem = f"has no token for word {missing[0] + 1} ({words[missing[0]]!a}); remove it and its tag"
                    raise _invalid_row(source, before + row + 1, column, problem)
                cut += len(words) - len(positions)
                labels.append([IGNORED] * len(encoding.ids))
                for word, position in positions.items():
                    labels[-1][position] = classes[row][word]
            return table_of([encoding.ids for encoding in encodings], labels), cut

        encoded, cut = encode_chunks(rows, encode)
        if cut:
            text = f"{source}: {cut} words lie beyond {self._texts.longest} tokens of their row and are not read"
            self.note(text, NoteCode.WORDS_CUT)
        return encoded

    def _classes_of(
        self, rows: Dataset, column: str, words: Sequence[Sequence[str]], source: str, before: int
    ) -> list[list[int]]:
        """The classes of tags, given by name or number; raise InputError unless every word has a tag of the model.

        `before` rows precede these.
        """
        feature, names = getattr(rows.features[column], "feature", None), dict[Any, str]()
        if isinstance(feature, ClassLabel) and set(feature.names) & self._classes.keys():
            names = dict(enumerate(feature.names))  # the numbers of a column with names are read as names
        classes: list[list[int]] = []
        for row, (tags, sentence) in enumerate(zip(rows[column][:], words, strict=True), before + 1):
            if tags is None:
                raise _invalid_row(source, row, column, "is missing; fill it or remove the row")
            if not isinstance(tags, list):
                raise _invalid_row(source, row, column, "is not a list of tags; give one tag for each word")
            if len(tags) != len(sentence):
                problem = f"has {len(tags)} tags for {len(sentence)} words; give one for each word"
                raise _invalid_row(source, row, column, problem)
            classes.append([])
            for tag in (names.get(tag, tag) if names else tag for tag in tags):
                number = self._classes.get(tag) if isinstance(tag, str) else tag
                if type(number) is not int or not 0 <= number < len(self._tags):
                    problem = (
                        f"has the tag {tag!r}, which is not among the model's ({listed_names(self._tags)}; id2label in"
                        " its config.json); correct the tag or remove the row"
                    )
                    details = {"code": ErrorCode.LABEL_MISMATCH, "value": tag, "labels": self._tags}
                    raise _invalid_row(source, row, column, problem, **details)
                classes[-1].append(number)
        return classes


MASKED_SHARE = 0.15
"""Share of the tokens of an example that are masked, as in BERT (Devlin et al. 2019, section 3.1)."""


class FillMask(TokenLabels):
    """Prediction of masked tokens of plain text, scored by accuracy or pseudo-perplexity; rows have no labels.

    In each example 15% of the tokens, at least one, are masked at once. A hash of the tokens selects them, so that all
    models, engines and evaluations read the same. The pseudo-perplexity is `exp` of the mean loss of the masked tokens.
    Salazar et al. (2020, "Masked language model scoring") mask the tokens of a text one by one, which takes a forward
    for each token, and usually gives lower values.

    Raises:
        InputError: the tokenizer has no mask token, the model is an encoder-decoder, or the maximum length leaves
            no room for text.
    """

    name = "fill-mask"
    metrics: ClassVar[tuple[Metric, ...]] = (
        TOKEN_ACCURACY,
        Metric("pseudo_perplexity", perplexity, higher_is_better=False),
    )

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(folder, request, metric)
        self._mask_id, self._special_ids = self._tokenizer.mask_token_id, frozenset(self._tokenizer.all_special_ids)
        if self._mask_id is None:
            text = (
                f"{folder.path}: its tokenizer has no mask token (mask_token), so no token can be masked; save the"
                " tokenizer that the model was trained with"
            )
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, path=folder.path, field="mask_token")
        if folder.config.is_encoder_decoder:
            text = (
                f"{folder.path}: {type(folder.model).__name__} is an encoder-decoder, which fills masks while it"
                " generates text; name another task (--task)"
            )
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, path=folder.path, field="task")

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Note how tokens are masked."""
        text = (
            f"{MASKED_SHARE:.0%} of the tokens of each row are masked, the same for every engine; the metric is that of"
            " the masked tokens"
        )
        self.notes = (Note(text=text, code=NoteCode.METRIC_SETTINGS),)

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Encode texts with masked tokens, whose ids are the labels; rows without a token to mask are dropped."""
        return self.encode_texts(rows, source)

    def label_text(self, ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """The ids with masks, and the ids of the masked tokens; special and unknown tokens are not masked."""
        positions = [position for position, token in enumerate(ids) if token not in self._special_ids]
        masked, labels = list(ids), [IGNORED] * len(ids)
        if positions:
            seed = int.from_bytes(hashlib.sha256(np.array(ids, np.int64).tobytes()).digest()[:8], "little")
            count = max(1, round(MASKED_SHARE * len(positions)))
            for position in np.random.default_rng(seed).choice(positions, count, replace=False).tolist():
                masked[position], labels[position] = self._mask_id, ids[position]
        return masked, labels

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[str]:
        """The tokens that are predicted at the masks of each example, in the spelling of the vocabulary."""
        rows = zip(logits.argmax(-1), labels != IGNORED, strict=True)
        return [self._tokens(classes[masked].tolist()) for classes, masked in rows]

    def reference_text(self, example: Mapping[str, Any]) -> str:
        return self._tokens([label for label in example["labels"] if label != IGNORED])

    def count(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[float]:
        """The number of correct tokens, or the summed loss in nats, and the number of masked tokens."""
        if self._metric == TOKEN_ACCURACY:
            return (logits.argmax(-1) == labels).sum(), len(labels)
        return float(token_losses(logits, labels).sum()), len(labels)

    def _tokens(self, ids: list[int]) -> str:
        return " ".join(self._tokenizer.convert_ids_to_tokens(ids))
