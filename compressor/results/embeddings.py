"""How far the embeddings of a compressed encoder are those of the dense one."""

from __future__ import annotations

from compressor.results.rows import Row


class EmbeddingAgreement(Row):
    """The embeddings of both engines on the texts of the test rows.

    `cosine` is the mean cosine of both embeddings of a text. The others are recall@10 of queries among documents:
    `dense` with both embedded by the dense engine, `own` by the compressed one, and `mixed` with queries embedded by
    the compressed engine and documents by the dense one, as in an index that is not built again. With `labelled` the
    relevant documents are those of the rows; else they are the ten that the dense engine finds, so that `dense` is 1.
    """

    texts: int
    queries: int
    documents: int
    cosine: float
    dense: float
    own: float
    mixed: float
    labelled: bool
