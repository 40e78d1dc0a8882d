"""A source text, and its translation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sacrebleu
import torch
from datasets import Dataset
from torch import Tensor

from compressor.errors import InputError
from compressor.model_folder import ModelFolder
from compressor.model_folder.example_inputs import token_limit
from compressor.silence_libraries import quiet_transformers
from compressor.tasks import beam
from compressor.tasks.base import DataRequest, Forward, Task
from compressor.tasks.columns import pair_columns
from compressor.tasks.metrics import bleu, bleu_counts, mean_loss

BEAMS = 5


class Translation(Task):
    """Targets that an encoder-decoder makes of sources: BLEU of beam search, or the loss with teacher forcing.

    BLEU is sacrebleu's, cased, over the rows' own target texts. The search keeps five beams; length penalty and special
    tokens are those of the model's generation configuration. What the model wants in front of every source, such as
    T5's prefixes, belongs into the rows.

    Args:
        folder: its tokenizer makes the tokens of both texts.
        request: the two columns, and the longest text of either side, which is also the longest translation.
        metric: one of `metrics`.

    Raises:
        InputError: the model does not make text of text, or its configuration does not say how a target starts.
    """

    name = "translation"
    metrics: tuple[str, ...] = ("bleu", "loss")

    def __init__(self, folder: ModelFolder, request: DataRequest, metric: str) -> None:
        model, config = folder.model, folder.config
        if not config.is_encoder_decoder or model.main_input_name != "input_ids":
            raise InputError(
                f"{folder.path}: {type(model).__name__} has no encoder of text with a decoder; translation needs one,"
                " such as Marian, BART or T5"
            )
        for needed in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, needed, None) is None:
                raise InputError(f"{folder.path}: config.json has no {needed}, a target cannot start; add it there")
        self.metric = metric
        self.higher_is_better = metric == "bleu"
        self._folder, self._request = folder, request
        self._tokenizer = folder.processor
        limits = (request.max_length, token_limit(model), self._tokenizer.model_max_length)
        self._longest = int(min(limit for limit in limits if limit))
        special = self._tokenizer.num_special_tokens_to_add()
        if self._longest <= special:
            raise InputError(
                f"{folder.path}: {self._longest} tokens a text leave no room beside {special} marks; raise --max-length"
            )
        if metric == "bleu":
            self.beams, self.longest = BEAMS, self._longest

    @property
    def chooser(self) -> Task:
        """The loss: a beam search for every checkpoint or subset of heads would take longer than all the rest."""
        return self if self.metric == "loss" else Translation(self._folder, self._request, "loss")

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Fix the direction, and say what was fixed."""
        self._columns = pair_columns(rows, self._request.text_columns, source)
        told = [f"each row is translated from its {self._columns[0]!r} to its {self._columns[1]!r}"]
        if self.metric == "bleu":
            told.append(
                f"BLEU is that of beam search ({BEAMS} beams, at most {self._longest} tokens), by sacrebleu"
                f" {sacrebleu.__version__} (case:mixed, tok:13a, smooth:exp); heads and checkpoints are chosen by the"
                " loss on the evaluation rows, not by BLEU"
            )
        self.notes = tuple(told)

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Sources to `input_ids`, targets to `labels` and, as they are, to `reference`."""
        sources, targets = (list(rows[name]) for name in pair_columns(rows, self._columns, source))
        settings = {"truncation": True, "max_length": self._longest, "return_token_type_ids": False}
        with quiet_transformers():
            encoded = self._tokenizer(sources, return_attention_mask=True, **settings)
            labels = self._tokenizer(text_target=targets, **settings)["input_ids"]
        ids = encoded["input_ids"]
        return Dataset.from_dict(
            {
                "input_ids": ids,
                "attention_mask": encoded["attention_mask"],
                "labels": labels,
                "reference": targets,
                "length": [max(map(len, pair)) for pair in zip(ids, labels, strict=True)],
            }
        )

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """`[batch, source]` and `[batch, target]`, padded on the right; the model's own shift makes decoder inputs."""
        fills = {"input_ids": self._folder.config.pad_token_id, "attention_mask": 0, "labels": -100}
        batch = {}
        for name, fill in fills.items():
            longest = max(len(example[name]) for example in examples)
            batch[name] = torch.tensor([[*row[name], *[fill] * (longest - len(row[name]))] for row in examples])
        model: Any = self._folder.model
        return {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])}

    def measure(self, forward: Forward, examples: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """BLEU's counts `[examples, 10]` of what beam search makes, or one forward's loss `[examples, 2]`."""
        if self.metric == "loss":
            return super().measure(forward, examples)
        batch = self.collate(examples)
        sources = {name: batch[name] for name in ("input_ids", "attention_mask")}
        made = beam.search(self._folder.model, forward, sources, BEAMS, self._longest)
        texts = self._tokenizer.batch_decode(made, skip_special_tokens=True)
        return np.stack([bleu_counts(text, row["reference"]) for text, row in zip(texts, examples, strict=True)])

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Summed loss in nats and tokens of each target, from logits `[batch, target, vocabulary]`: not of `bleu`."""
        scores, targets = torch.from_numpy(logits).float(), torch.from_numpy(labels)
        losses = torch.nn.functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none").double().sum(1)
        return np.stack([losses.numpy(), (labels != -100).sum(1)], axis=-1).astype(np.float64)

    def score(self, statistics: np.ndarray) -> float:
        """BLEU over rows of its counts, or the mean loss a token over rows of (loss, tokens)."""
        return bleu(statistics) if self.metric == "bleu" else mean_loss(statistics[:, 0], statistics[:, 1])
