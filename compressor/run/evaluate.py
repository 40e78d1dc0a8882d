"""The metric of both engines on the test rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from compressor.config.sections import SelectionConfig
from compressor.measure import paired_interval
from compressor.progress import ProgressCallback
from compressor.results import EmbeddingAgreement, Score
from compressor.run.embeddings import agreement_note, agreement_of
from compressor.run.products import Variant
from compressor.run.run_log import RunLog
from compressor.targets.segment_stream import Stream, limits
from compressor.tasks import Data, statistics
from compressor.tasks.segment_streams import Streams, read
from compressor.tasks.sentence_similarity import SentenceSimilarity


@dataclass(frozen=True)
class Evaluated:
    """What the test rows show of two engines.

    Attributes:
        scores: the metric of both; empty without rows.
        embeddings: how far their embeddings agree; None for other tasks.
    """

    scores: tuple[Score, ...] = ()
    embeddings: EmbeddingAgreement | None = None


def evaluate(variants: Sequence[Variant], data: Data | None, selection: SelectionConfig, log: RunLog) -> Evaluated:
    """Evaluate the dense and the compressed engine on the test rows, and note how far their embeddings agree.

    Args:
        variants: the dense and the compressed variant.
        data: the test rows and the task; None: there are none.
        selection: batch size, and seed of the bootstrap.
        log: receives stages and notes.
    """
    if data is None:
        return Evaluated()
    has_embeddings = isinstance(data.task, SentenceSimilarity)
    statistics, logits = [], []
    for variant in variants:
        batches: list[np.ndarray] = []
        with log.stage(f"{variant.name}: scoring on the test rows") as on_progress:
            on_logits = batches.append if has_embeddings else None
            statistics.append(statistics_of(variant, data, selection.batch_size, on_progress, on_logits=on_logits))
        logits.append(batches)
    agreement = agreement_of(logits[0], logits[1], data) if has_embeddings else None
    if agreement is not None:
        log.add_notes([agreement_note(agreement)])
    dense, compressed = statistics
    return Evaluated((score(dense, compressed, data, selection.seed),), agreement)


def statistics_of(
    variant: Variant,
    data: Data,
    batch_size: int,
    on_progress: ProgressCallback,
    *,
    rows: Dataset | None = None,
    on_logits: Callable[[np.ndarray], None] | None = None,
) -> np.ndarray:
    """Sufficient statistics of the metric, `[examples, statistics]`, computed by the engine.

    Args:
        variant: the variant whose engine runs.
        data: the test rows and the task.
        batch_size: number of parallel streams, for a task that reads texts in order.
        on_progress: called with (rows scored, rows).
        rows: the rows to score; None: the test rows.
        on_logits: called with the logits of each batch; not called by a task that reads texts in order.
    """
    rows, scored = data.test if rows is None else rows, 0

    def forward(batch: dict[str, Tensor]) -> np.ndarray:
        outputs = variant.engine.run({name: value.numpy() for name, value in batch.items()})
        logits = data.task.logits(data.task.scored_outputs(outputs, batch))
        if on_logits is not None:
            on_logits(logits)
        return logits

    def progress(count: int) -> None:
        nonlocal scored
        on_progress(scored := scored + count, len(rows))

    if isinstance(data.task, Streams) and limits(variant.graph.path) is not None:  # without memory a segment is a row
        stream = Stream(variant.engine, variant.graph.path)

        def segment(ids: Tensor) -> Tensor:
            return torch.from_numpy(stream.read(ids.numpy()))

        return read(data.task, rows, segment, batch_size, progress)
    return statistics(data.task, rows, forward, progress=progress)


def score(dense: np.ndarray, compressed: np.ndarray, data: Data, seed: int) -> Score:
    """The metric of both variants, and a paired bootstrap interval of the difference.

    Args:
        dense: statistics of the dense variant, `[examples, statistics]`.
        compressed: statistics of the compressed variant for the same examples, `[examples, statistics]`.
        data: the rows that were scored, and the task.
        seed: seed of the bootstrap.
    """
    task = data.task
    interval = paired_interval(dense, compressed, task.score, seed)
    return Score(
        metric=task.metric,
        split="test",
        rows=len(data.test),
        dense=task.score(dense),
        compressed=task.score(compressed),
        **interval._asdict(),
        higher_is_better=task.higher_is_better,
        unit=task.metric_unit,
    )
