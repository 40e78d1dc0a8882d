"""The results of a run as data: `report.json`. The page, the command's output and the exit code derive from it."""

from compressor.results.answers import AnsweredRow
from compressor.results.budgets import BudgetRow, CostShare, CostUnit
from compressor.results.certificates import CertificateScope, CertifiedLoss
from compressor.results.embeddings import EmbeddingAgreement
from compressor.results.engines import (
    BuiltLayer,
    Candidate,
    EngineBuild,
    EngineFacts,
    QuantizedProducts,
    labels_by_failure,
)
from compressor.results.metrics import (
    CurvePoint,
    MetricUnit,
    Score,
    deciding_scores,
    headline_scores,
    is_within,
    keeps_metric,
    loss_of,
)
from compressor.results.notes import AnyNote, Note, NoteCode
from compressor.results.proofs import FLOAT_STAGES, Proof, ProofStage, VariantName
from compressor.results.report import DropStatus, MissingTarget, Refusal, Report, SiteBlocks, TaskCode
from compressor.results.times import Latency, RowRates, Speed, Throughput, size_label

__all__ = [
    "FLOAT_STAGES",
    "AnsweredRow",
    "AnyNote",
    "BudgetRow",
    "BuiltLayer",
    "Candidate",
    "CertificateScope",
    "CertifiedLoss",
    "CostShare",
    "CostUnit",
    "CurvePoint",
    "DropStatus",
    "EmbeddingAgreement",
    "EngineBuild",
    "EngineFacts",
    "Latency",
    "MetricUnit",
    "MissingTarget",
    "Note",
    "NoteCode",
    "Proof",
    "ProofStage",
    "QuantizedProducts",
    "Refusal",
    "Report",
    "RowRates",
    "Score",
    "SiteBlocks",
    "Speed",
    "TaskCode",
    "Throughput",
    "VariantName",
    "deciding_scores",
    "headline_scores",
    "is_within",
    "keeps_metric",
    "labels_by_failure",
    "loss_of",
    "size_label",
]
