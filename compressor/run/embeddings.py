"""Embeddings of a compressed encoder beside those of the dense one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import normalize

from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import ModelFolder
from compressor.models.pooled_encoder import EMBEDDING, SentenceEncoder
from compressor.results import EmbeddingAgreement, Note, NoteCode
from compressor.tasks import Data, batches
from compressor.tasks.forwards import forward_arguments
from compressor.tasks.scoring import draw_rows
from compressor.tasks.sentence_similarity import Judgements, nearest, pair_embeddings, ranking_scores

_DOCUMENTS = 1024
"""Maximum number of documents that texts are ranked against."""


def rank_documents(folder: ModelFolder, data: Data, seed: int) -> None:
    """Give an encoder, as it is now, documents of the training rows against whose embeddings it ranks texts.

    Args:
        folder: the model.
        data: the rows; their second texts are the documents, or their only ones.
        seed: seed of the draw of documents.

    Raises:
        UsageError: the model is not a sentence encoder, or there are no training rows.
    """
    model = folder.model
    if not isinstance(model, SentenceEncoder) or not len(data.train):
        problem = "there are no training rows (--data)" if isinstance(model, SentenceEncoder) else "it embeds no texts"
        raise UsageError(
            f"--match-dense: {folder.path}: {problem}; omit it",
            code=ErrorCode.CONTRADICTION,
            field="match_dense",
            task=folder.task,
        )
    embeddings = []
    for _, batch in batches(data.task, draw_rows(data.train, _DOCUMENTS, seed)):
        with torch.no_grad():
            output = model(**forward_arguments(model, data.task.model_inputs(batch)))[EMBEDDING]
        embeddings.append(pair_embeddings(output.cpu().numpy(), batch[data.task.label_name].numpy())[1])
    model.documents = normalize(torch.from_numpy(np.unique(np.concatenate(embeddings), axis=0)), dim=-1)


def agreement_of(
    dense_batches: Sequence[np.ndarray], compressed_batches: Sequence[np.ndarray], data: Data
) -> EmbeddingAgreement:
    """How far the embeddings of both engines agree on the test rows.

    Args:
        dense_batches: embeddings of the dense engine, `[texts, width]` for each batch of `scoring.batches`.
        compressed_batches: those of the compressed engine.
        data: the rows, and a task that embeds texts.
    """
    task, test_batches = data.task, batches(data.task, data.test)
    pairs = np.concatenate([batch[task.label_name].numpy()[:, :3] for _, batch in test_batches])
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
