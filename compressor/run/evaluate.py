"""The metric of both engines on the test rows, and their answers to a few of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compressor.config.run import Recipe
from compressor.engines.build import Variant
from compressor.engines.score import forward_of, metric_sums_of, reads_in_order, score, score_notes
from compressor.progress import RunLog
from compressor.results import AnsweredRow
from compressor.run.embeddings import agreement_note, agreement_of
from compressor.run.report_fields import EvaluationResult
from compressor.tasks import Data, batches
from compressor.tasks.base import Forward
from compressor.tasks.encoding import row_texts, shorten, shorten_both
from compressor.tasks.scoring import BATCH_SIZE
from compressor.tasks.sentence_similarity import cosines_of, pair_embeddings, unit_rows


def evaluate(variants: Sequence[Variant], data: Data | None, recipe: Recipe, log: RunLog) -> EvaluationResult:
    """Evaluate the dense and the compressed engine on the test rows, and note how far their embeddings agree.

    Args:
        variants: the dense and the compressed variant.
        data: the test rows, if there are any, and the task; None: there are no rows.
        recipe: batch size, seed of the bootstrap, and number of rows whose answers are shown.
        log: receives stages and notes.
    """
    if data is None or not len(data.test):
        return EvaluationResult()
    selection, count = recipe.selection, recipe.output.report_rows
    sums, logits = [], []
    for variant in variants:
        parts: list[np.ndarray] = []
        with log.stage(f"{variant.name}: scoring on the test rows") as on_progress:
            on_logits = (lambda values, _, kept=parts: kept.append(values)) if data.task.embeds else None
            sums.append(metric_sums_of(variant, data, selection.batch_size, on_progress, on_logits=on_logits))
        logits.append(parts)
    dense, compressed = sums
    scores = (score(dense, compressed, data.task, "test", len(data.test), selection.seed),)
    constant, order = data.task.constant_score(dense), data.task.order_text(dense, "test")
    log.add_notes(score_notes(scores[0], dense, compressed, constant, order))
    if data.task.embeds:
        agreement = agreement_of(logits[0], logits[1], data)
        log.add_notes([agreement_note(agreement)])
        return EvaluationResult(scores, agreement, embedded_rows(logits[0], logits[1], data, count) if count else ())
    if not count or any(reads_in_order(variant, data.task) for variant in variants):
        return EvaluationResult(scores)
    with log.stage("comparing answers"):
        forwards = [forward_of(variant, data.task) for variant in variants]
        return EvaluationResult(scores, answers=answered_rows(forwards, sums, data, count))


def answered_rows(
    forwards: Sequence[Forward], sums: Sequence[np.ndarray], data: Data, count: int
) -> tuple[AnsweredRow, ...]:
    """The test rows whose metric sums changed most, with the answers of both engines; those that changed come first.

    Only these rows are read again, at least a batch of them. An answer that changes without a change of its metric
    sums, such as one that was wrong and stays wrong, is shown only if it is among them.

    Args:
        forwards: runs of the dense and of the compressed engine.
        sums: metric sums of both on the test rows, `[examples, k]`.
        data: the test rows, and the task.
        count: maximum number of rows.

    Raises:
        UsageError: a custom task does not give one answer for each row.
    """
    changes = _changes(sums, len(data.test))
    indices = np.argsort(-changes, kind="stable")[: max(count, BATCH_SIZE)].tolist()
    examples = [data.test[index] for index in indices]
    dense, compressed = (_answers(data, forward, examples) for forward in forwards)
    if not dense:
        return ()
    rows = [
        AnsweredRow(
            number=index + 1,
            texts=row_texts(example, data.tokenizer),
            expected=shorten(data.task.reference_text(example)),
            dense=shown[0],
            compressed=shown[1],
            changed=before != after,
        )
        for index, example, before, after in zip(indices, examples, dense, compressed, strict=True)
        for shown in [shorten_both(before, after)]
    ]
    return tuple(sorted(rows, key=lambda row: not row.changed)[:count])


def _answers(data: Data, forward: Forward, examples: Sequence[dict[str, object]]) -> list[str]:
    """The answers of an engine; empty for a task whose answers have no text."""
    starts = range(0, len(examples), BATCH_SIZE)
    return [text for start in starts for text in data.task.answers(forward, examples[start : start + BATCH_SIZE])]


def _changes(sums: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """How far the metric sums of each row differ, `[rows]`; zero where they are of something else than a row."""
    dense, compressed = sums
    return np.abs(dense - compressed).sum(1) if len(dense) == rows else np.zeros(rows)


def embedded_rows(
    dense_batches: Sequence[np.ndarray], compressed_batches: Sequence[np.ndarray], data: Data, count: int
) -> tuple[AnsweredRow, ...]:
    """The test rows with the lowest cosine between both engines' embeddings of a text, the lowest first.

    Args:
        dense_batches: embeddings of the dense engine, `[texts, width]` for each batch of `scoring.batches`.
        compressed_batches: those of the compressed engine.
        data: the rows, and a task that embeds texts.
        count: maximum number of rows.
    """
    rows: list[tuple[float, int, float, float]] = []
    groups = zip(batches(data.task, data.test), dense_batches, compressed_batches, strict=True)
    for (indices, batch), dense, compressed in groups:
        pairs = batch[data.task.label_name].numpy()
        both = (unit_rows(dense) * unit_rows(compressed)).sum(1, keepdims=True)
        lowest = np.minimum(*pair_embeddings(both, pairs))[:, 0]
        before, after = (_cosines(embeddings, pairs, data) for embeddings in (dense, compressed))
        rows.extend(zip(lowest.tolist(), indices, before.tolist(), after.tolist(), strict=True))
    return tuple(
        AnsweredRow(
            number=index + 1,
            texts=row_texts(data.test[index], data.tokenizer),
            expected=data.task.reference_text(data.test[index]),
            dense=f"{before:.3f}",
            compressed=f"{after:.3f}",
            changed=f"{before:.3f}" != f"{after:.3f}",
            cosine=cosine,
        )
        for cosine, index, before, after in sorted(rows)[:count]
    )


def _cosines(embeddings: np.ndarray, pairs: np.ndarray, data: Data) -> np.ndarray:
    """The cosine of both texts of each pair, or of each single text with the embedding that is its label, `[pairs]`."""
    if data.task.retrieves:
        return cosines_of(*pair_embeddings(embeddings, pairs))
    return data.task.per_example(embeddings, pairs)[:, 0]
