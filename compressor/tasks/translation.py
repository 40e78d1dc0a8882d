"""Translation: generate a target text from a source text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from datasets import Dataset

from compressor.answers import LABELS
from compressor.config.sections import RowsConfig
from compressor.environment import package_version
from compressor.errors import ErrorCode, InputError
from compressor.results import Note, NoteCode
from compressor.tasks.base import Batch, Forward, Task
from compressor.tasks.columns import TextColumns
from compressor.tasks.encoding import TextTokenizer, count_cut, encode_chunks, pad
from compressor.tasks.metrics import Metric, bleu, bleu_counts, mean_loss, summed_losses

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compressor.model_folder import ModelFolder

BEAMS = 5
"""Number of beams of the beam search."""

_LANGUAGE = r"[a-z]{2}([-_][A-Za-z]{2,4})?"  # name of a column that is a language: `de`, `pt_BR`

_BLEU = Metric("bleu", bleu, maximum=100.0)
_LOSS = Metric("loss", mean_loss, higher_is_better=False, point=math.log(1.01))  # 1% of a perplexity


class Translation(Task):
    """Translation by an encoder-decoder, scored by BLEU of beam search or by the loss with teacher forcing.

    BLEU is sacrebleu's, cased, against the target texts as they are. The search is that of transformers, with five
    beams, and with key/value caches where there are any; length penalty and special tokens are those of the model's
    generation configuration. The maximum length limits sources, targets and generated texts. Rows must contain prefixes
    that the model expects in every source, such as T5's. Rows without targets get those that the whole model generates.

    Raises:
        InputError: the model is not an encoder-decoder of text, its configuration lacks the token that starts a target,
            or the maximum length leaves no room for text.
    """

    name = "translation"
    generates = True
    metrics: ClassVar[tuple[Metric, ...]] = (_BLEU, _LOSS)
    text_columns: ClassVar[TextColumns] = TextColumns(
        usual=(("source", "target"), ("src", "tgt"), ("src", "trg"), ("source_text", "target_text")),
        counts=(2,),
        description="pair of source and target",
        example="de,en",
        allows_empty=False,
        pattern=_LANGUAGE,
    )
    source_columns: ClassVar[TextColumns] = TextColumns(
        usual=(("source",), ("src",), ("source_text",), *TextColumns().usual),
        counts=(1,),
        description="source text",
        example="de",
        allows_empty=False,
        pattern=".*",
    )

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(metric)
        model, config = folder.model, folder.config
        if not config.is_encoder_decoder or model.main_input_name != "input_ids":
            text = (
                f"{folder.path}: {type(model).__name__} is not an encoder-decoder of text, which translation needs; use"
                " one such as Marian, BART or T5"
            )
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, path=folder.path)
        for field in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, field, None) is None:
                text = f"{folder.path}: config.json has no {field}, which starts or pads a target; add it there"
                raise InputError(text, code=ErrorCode.MISSING_VALUE, path=folder.path / "config.json", field=field)
        self._folder, self._request = folder, request
        self._tokenizer = folder.processor
        self._columns: tuple[str, ...] = request.text_columns
        self._texts = TextTokenizer(folder, request)
        if metric == _BLEU:
            self.beams, self.max_new_tokens = BEAMS, self._texts.longest

    @property
    def chooser(self) -> Task:
        """This task with the metric loss; beam search for every checkpoint or subset of heads would take too long."""
        return self if self._metric == _LOSS else Translation(self._folder, self._request, _LOSS)

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Determine the columns of source and target of all splits, and note them."""
        if self._metric == _BLEU:
            settings = (
                f"BLEU is that of beam search ({BEAMS} beams, at most {self._texts.longest} tokens) by sacrebleu"
                f" {package_version('sacrebleu')} (case:mixed, tok:13a, smooth:exp); heads and checkpoints are chosen"
                " by the loss on the evaluation rows, not by BLEU"
            )
            self.notes = (Note(text=settings, code=NoteCode.METRIC_SETTINGS),)
        self._columns = self.text_columns.find(rows, self._request.text_columns, source)
        first, second = self._columns
        text = f"each row is translated from its {first!r} to its {second!r}"
        self.notes = (Note(text=text, code=NoteCode.TEXT_COLUMNS), *self.notes)

    def encode(self, rows: Dataset, source: str) -> Dataset:
        return self._encode(rows, self.text_columns.find(rows, self._columns, source), source)

    def encode_unlabelled(self, rows: Dataset, source: str) -> Dataset:
        """Encode sources with their targets if there are any, else with empty targets (`targets_by`)."""
        columns = self._columns or self._request.text_columns
        if set(columns) <= set(rows.column_names) and (columns or self.text_columns.find_usual(rows)):
            return self._encode(rows, self.text_columns.find(rows, columns, source), source)
        return self._encode(rows, self.source_columns.find(rows, columns[:1], source), source)

    def _encode(self, rows: Dataset, names: Sequence[str], source: str) -> Dataset:
        """The examples of rows, from the column of sources and, if there is one, that of targets."""

        def encode_chunk(chunk: Dataset, _: int) -> tuple[dict[str, Any], int]:
            sources, *second = (list(chunk[name]) for name in names)
            (targets,) = second or [[""] * len(chunk)]
            encodings = self._texts(sources, return_attention_mask=True), self._texts(text_target=targets)
            ids, labels = (encoding["input_ids"] for encoding in encodings)
            columns = {
                "input_ids": ids,
                "attention_mask": encodings[0]["attention_mask"],
                "labels": labels,
                "reference": targets,
                "length": [max(map(len, pair)) for pair in zip(ids, labels, strict=True)],
            }
            return columns, sum(map(count_cut, encodings))

        encoded, cut = encode_chunks(rows, encode_chunk)
        self.notes = (*self.notes, *self._texts.cut_notes(source, cut, len(names) * len(rows), "texts"))
        return encoded

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Sources `[batch, source]` and targets `[batch, target]`, padded on the right.

        Decoder inputs are the targets, shifted by the model.
        """
        from compressor.models.beam_search import decoder_inputs

        fills = {"input_ids": self._folder.config.pad_token_id, "attention_mask": 0, "labels": -100}
        batch = {name: pad([example[name] for example in examples], fill) for name, fill in fills.items()}
        return {**batch, "decoder_input_ids": decoder_inputs(self._folder.model, batch["labels"])}

    def measure(self, forward: Forward, examples: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """`bleu_counts` `[examples, 10]` of the texts that beam search generates, or losses `[examples, 2]`."""
        if self._metric == _LOSS:
            return super().measure(forward, examples)
        texts = self._translate(forward, examples)
        return np.stack([bleu_counts(text, row["reference"]) for text, row in zip(texts, examples, strict=True)])

    def answers(self, forward: Forward, examples: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        """The translations of beam search; none if the metric is the loss, which generates nothing."""
        return () if self._metric == _LOSS else self._translate(forward, examples)

    def labels_by(self, forward: Forward, examples: Sequence[Mapping[str, Any]]) -> Mapping[str, Sequence[Any]]:
        """The translations of beam search as targets."""
        return self._with_targets(examples, self._translate(forward, examples))

    def targets_by(
        self, model: PreTrainedModel, examples: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Sequence[Any]] | None:
        """The most likely token after each token as targets, where there are none.

        A beam search takes too long for the many rows of a training.
        """
        if any(example["reference"] for example in examples):
            return None
        from compressor.models.beam_search import greedy_search

        ids = greedy_search(model, self._sources(examples), self._texts.longest)
        return self._with_targets(examples, self._tokenizer.batch_decode(ids, skip_special_tokens=True))

    def _with_targets(
        self, examples: Sequence[Mapping[str, Any]], targets: Sequence[str]
    ) -> Mapping[str, Sequence[Any]]:
        labels = self._texts(text_target=targets)["input_ids"]
        lengths = [max(len(example["input_ids"]), len(ids)) for example, ids in zip(examples, labels, strict=True)]
        return {LABELS: labels, "reference": targets, "length": lengths}

    def _translate(self, forward: Forward, examples: Sequence[Mapping[str, Any]]) -> list[str]:
        from compressor.models.beam_search import beam_search

        ids = beam_search(self._folder.model, forward, self._sources(examples), BEAMS, self._texts.longest)
        return list(self._tokenizer.batch_decode(ids, skip_special_tokens=True))

    def _sources(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        batch = self.collate(examples)
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Summed loss in nats and tokens of each target, from logits `[batch, target, vocabulary]`; not for BLEU."""
        return summed_losses(logits, labels)
