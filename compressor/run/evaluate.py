"""The metric of both engines on the test rows, and their answers to a few of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compressor.config.run import Recipe
from compressor.engines.build import Variant
from compressor.engines.score import forward_of, metric_sums_of, reads_in_order, score, score_notes
from compressor.progress import RunLog
from compressor.results import AnsweredRow, EmbeddingAgreement, Note, NoteCode, Score
from compressor.tasks import Data, batches
from compressor.tasks.base import Forward
from compressor.tasks.encoding import row_texts, shorten, shorten_both
from compressor.tasks.scoring import BATCH_SIZE
from compressor.tasks.sentence_similarity import (
    Judgements,
    cosines_of,
    nearest,
    pair_embeddings,
    ranking_scores,
    unit_rows,
)


def evaluate(
    variants: Sequence[Variant], data: Data, recipe: Recipe, log: RunLog
) -> tuple[tuple[Score, ...], EmbeddingAgreement | None, tuple[AnsweredRow, ...]]:
    """Evaluate the dense and the compressed engine on the test rows, and note how far their embeddings agree.

    Returns:
        Their metric, the agreement of their embeddings, and their answers to a few rows.
    """
    if not len(data.test):
        return (), None, ()
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
        return scores, agreement, embedded_rows(logits[0], logits[1], data, count) if count else ()
    if not count or any(reads_in_order(variant, data.task) for variant in variants):
        return scores, None, ()
    with log.stage("comparing answers"):
        forwards = [forward_of(variant, data.task) for variant in variants]
        return scores, None, answered_rows(forwards, sums, data, count)


def answered_rows(
    forwards: Sequence[Forward], sums: Sequence[np.ndarray], data: Data, count: int
) -> tuple[AnsweredRow, ...]:
    """The test rows whose metric sums changed most, with the answers of both engines; those that changed come first.

    Only these rows are read again, at least a batch of them. An answer that changes without a change of its metric
    sums (`[examples, k]` of both engines), such as one that was wrong and stays wrong, is shown only if it is among
    them.

    Raises:
        UsageError: a custom task does not give one answer for each row.
    """
    changes = np.zeros(len(data.test))  # sums may be of something else than a row
    if len(sums[0]) == len(changes):
        changes = np.abs(sums[0] - sums[1]).sum(1)
    indices = np.argsort(-changes, kind="stable")[: max(count, BATCH_SIZE)].tolist()
    examples = [data.test[index] for index in indices]
    parts = [examples[start : start + BATCH_SIZE] for start in range(0, len(examples), BATCH_SIZE)]
    dense, compressed = ([text for part in parts for text in data.task.answers(run, part)] for run in forwards)
    if not dense:  # the answers of the task have no text
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


def embedded_rows(
    dense_batches: Sequence[np.ndarray], compressed_batches: Sequence[np.ndarray], data: Data, count: int
) -> tuple[AnsweredRow, ...]:
    """The test rows with the lowest cosine between both engines' embeddings of a text, the lowest first."""
    rows: list[tuple[float, int, float, float]] = []
    groups = zip(batches(data.task, data.test), dense_batches, compressed_batches, strict=True)
    for (indices, batch), dense, compressed in groups:
        pairs = batch[data.task.label_name]
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


def agreement_of(
    dense_batches: Sequence[np.ndarray], compressed_batches: Sequence[np.ndarray], data: Data
) -> EmbeddingAgreement:
    """How far the embeddings of both engines, `[texts, width]` for each batch of `batches`, agree on the test rows."""
    task, test_batches = data.task, batches(data.task, data.test)
    pairs = np.concatenate([batch[task.label_name][:, :3] for _, batch in test_batches])
    if not task.retrieves:
        pairs[:, 0] = 1.0  # every first text is a query
    texts = [np.concatenate(list(parts)) for parts in (dense_batches, compressed_batches)]
    dense, compressed = (pair_embeddings(embeddings, pairs) for embeddings in texts)
    pairs[:, 2] = np.where(pairs[:, 2] < 0, pairs[:, 1], pairs[:, 2])  # single texts are documents too
    # A small change of an embedding changes its cosine in the second order, which float32 rounds to one.
    wide = [rows.astype(np.float64) for rows in texts]
    norms = np.linalg.norm(wide[0], axis=1) * np.linalg.norm(wide[1], axis=1)
    cosines = (wide[0] * wide[1]).sum(1) / np.maximum(norms, np.finfo(np.float64).tiny)
    judgements = Judgements.of(pairs)
    gains = judgements.gains
    if not task.retrieves:
        retrieved = nearest(dense[0][judgements.queries], dense[1][judgements.documents])
        gains = tuple(dict.fromkeys(row, 1.0) for row in retrieved.tolist())

    def recall(queries: np.ndarray, documents: np.ndarray) -> float:
        nearest_documents = nearest(queries[judgements.queries], documents[judgements.documents])
        return float(ranking_scores(nearest_documents, gains)[:, 0].mean())

    return EmbeddingAgreement(
        texts=len(cosines),
        queries=len(judgements.queries),
        documents=len(judgements.documents),
        cosine=float(cosines.mean()),
        dense=recall(*dense),
        own=recall(*compressed),
        mixed=recall(compressed[0], dense[1]),
        labelled=task.retrieves,
    )


def agreement_note(agreement: EmbeddingAgreement) -> Note:
    """What a reader has to know before documents that the dense model embedded are searched."""
    relevant = "" if agreement.labelled else ", where the ten texts that the dense model finds are relevant"
    dense = f" (dense: {agreement.dense:.3f})" if agreement.labelled else ""
    text = (
        f"the embeddings are not those of the dense model: mean cosine {agreement.cosine:.3f} over {agreement.texts}"
        f" texts; recall@10 of {agreement.queries} queries among {agreement.documents} documents is"
        f" {agreement.own:.3f} with documents embedded again, and {agreement.mixed:.3f} with documents embedded by the"
        f" dense model{dense}{relevant}"
    )
    return Note(code=NoteCode.EMBEDDINGS_CHANGED, text=text)
