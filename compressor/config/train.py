"""The configuration of `compress train`: one frozen model, one flag per field.

The defaults for words are those of Shim et al. 2021 ("Layer-wise Pruning of Transformer Attention Heads for Efficient
Language Modeling").
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field

from compressor.config.fields import FieldConflictError, Rule, config_field
from compressor.config.request import Request
from compressor.config.sections import RowsConfig
from compressor.config.values import Count, Names, Natural, NonNegative, Positive
from compressor.errors import ErrorCode

Fraction = Annotated[float, Field(ge=0, le=1)]
MODEL, DATA, TRAINING, OUTPUT = "Model", "Data", "Training", "Output"


class Training(Request):
    """The configuration of a training from scratch. It is frozen, and validated at construction.

    Raises:
        UsageError: a field is missing or out of its range, or two fields contradict each other.
    """

    out: Path = config_field(OUTPUT, "the model folder to write", required=True)
    force: bool = config_field(OUTPUT, "replace the folder, and checkpoints of another training", False, is_basic=True)

    data: str = config_field(
        DATA,
        "training text: .txt, or a column of TSV, CSV or JSONL, each also .xz or .gz",
        required=True,
        is_basic=True,
    )
    eval_data: str | None = config_field(
        DATA, "text that selects the best checkpoint; default: the end of the training text", is_basic=True
    )
    test_data: str | None = config_field(DATA, "text that is reported on; default: that of --eval-data", is_basic=True)
    text_columns: Names = config_field(DATA, "column of the text; default: recognized by name", ())
    level: Literal["word", "character"] = config_field(
        DATA, "unit of a token; characters are a to z and the space", "word", is_basic=True
    )
    vocabulary: Count | None = config_field(
        DATA, "maximum number of words, the most frequent first; default: all", is_basic=True
    )

    architecture: Literal["all-attention", "transformer-xl"] = config_field(
        MODEL, "architecture of the model", "all-attention", is_basic=True
    )
    layers: Count = config_field(MODEL, "layers", 16, is_basic=True)
    hidden: Count = config_field(MODEL, "width of the model", 512, is_basic=True)
    heads: Count = config_field(MODEL, "heads per layer", 8, is_basic=True)
    persistent: Natural = config_field(
        MODEL,
        "persistent vectors per head; for transformer-xl the inner width of the feed-forward layer",
        2048,
        is_basic=True,
    )
    memory: Natural = config_field(MODEL, "tokens of earlier segments that a layer remembers", 192, is_basic=True)
    attention_dropout: Fraction = config_field(MODEL, "dropout of attention maps", 0.2)
    embedding_dropout: Fraction = config_field(MODEL, "dropout of embeddings", 0.1)
    hidden_dropout: Fraction = config_field(MODEL, "dropout of the output of each sublayer", 0.1)

    steps: Count = config_field(TRAINING, "training steps", 160_000, is_basic=True)
    batch_size: Count = config_field(TRAINING, "parallel streams of text per process", 96, is_basic=True)
    segment: Count = config_field(TRAINING, "tokens per stream and training step", 192, is_basic=True)
    optimizer: Literal["lamb", "adamw"] = config_field(TRAINING, "optimizer", "lamb")
    learning_rate: Positive = config_field(TRAINING, "peak learning rate", 1e-2, is_basic=True)
    final_learning_rate: NonNegative = config_field(TRAINING, "learning rate at the end of the cosine schedule", 1e-4)
    warmup: Fraction = config_field(TRAINING, "share of the training steps in which the learning rate rises", 0.025)
    weight_decay: NonNegative = config_field(TRAINING, "weight decay of matrices", 0.0)
    max_grad_norm: Positive = config_field(TRAINING, "maximum norm of the gradient", 1.0)
    mixed_precision: Literal["auto", "no", "bf16"] = config_field(
        TRAINING,
        "precision of matmuls; auto: bf16 on a GPU that computes it natively, else float32",
        "auto",
        is_basic=True,
    )
    evaluations: Count = config_field(
        TRAINING, "evenly spaced evaluations; each writes a checkpoint", 20, is_basic=True
    )
    seed: Natural = config_field(TRAINING, "seed of every random draw", 0, is_basic=True)

    rules = (
        Rule("vocabulary", "the characters are always a to z and the space; omit it", excludes=("level=character",)),
    )

    @pydantic.model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.hidden % self.heads or self.hidden % 2:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<hidden> {self.hidden}: must be even and divisible by <heads> {self.heads}; choose another width",
                *("hidden", "heads"),
            )
        if self.final_learning_rate > self.learning_rate:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<final_learning_rate> {self.final_learning_rate:g}: above the peak of the schedule, <learning_rate>"
                f" {self.learning_rate:g}; choose a smaller one",
                *("final_learning_rate", "learning_rate"),
            )
        return self

    @property
    def rows(self) -> RowsConfig:
        """The texts as rows of a language model: a row is a segment."""
        return RowsConfig(
            data=self.data,
            eval_data=self.eval_data,
            test_data=self.test_data,
            text_columns=self.text_columns,
            max_length=self.segment,
            stride=0,
        )
