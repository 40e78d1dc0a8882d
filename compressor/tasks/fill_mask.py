"""Fill-mask: predict masked tokens of plain text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.results import MetricUnit, Note, NoteCode
from compressor.tasks.forwards import IGNORED
from compressor.tasks.metrics import Metric, perplexity, token_accuracy
from compressor.tasks.token_labels import TokenLabels

MASKED_SHARE = 0.15
"""Share of the tokens of an example that are masked, as in BERT (Devlin et al. 2019, section 3.1)."""

_ACCURACY = Metric("accuracy", token_accuracy, MetricUnit.POINTS, maximum=1.0)
_PSEUDO_PERPLEXITY = Metric("pseudo_perplexity", perplexity, higher_is_better=False)


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
    metrics: ClassVar[tuple[Metric, ...]] = (_ACCURACY, _PSEUDO_PERPLEXITY)

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
            raise InputError(
                f"{folder.path}: {type(folder.model).__name__} is an encoder-decoder, which fills masks while it"
                " generates text; name another task (--task)",
                code=ErrorCode.UNSUPPORTED_MODEL,
                path=folder.path,
                field="task",
            )

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
        """The masked tokens of an example."""
        return self._tokens([label for label in example["labels"] if label != IGNORED])

    def count(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[float]:
        """The number of correct tokens, or the summed loss in nats, and the number of masked tokens."""
        if self._metric == _ACCURACY:
            return (logits.argmax(-1) == labels).sum(), len(labels)
        losses = cross_entropy(torch.from_numpy(logits).float(), torch.from_numpy(labels), reduction="none")
        return float(losses.double().sum()), len(labels)

    def _tokens(self, ids: list[int]) -> str:
        return " ".join(self._tokenizer.convert_ids_to_tokens(ids))
