"""What `compress train` is asked for: one frozen object, one flag a field. The defaults are Shim et al.'s for words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from compressor.config.run import Names, field_of, flag_of
from compressor.errors import UsageError

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Training(BaseModel):
    """Everything that decides what a training from scratch computes. Frozen, and validated where it is made.

    Raises:
        pydantic.ValidationError: a field is out of its range, or two fields contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    out: Path = Field(description="the model folder to write", json_schema_extra={"group": "Output"})
    force: bool = field_of("Output", "replace the folder, and checkpoints of another training", False)

    data: str = Field(
        description="the text to learn from: .txt, or a column of TSV, CSV or JSONL, each also .xz or .gz",
        json_schema_extra={"group": "Data"},
    )
    eval_data: str | None = field_of(
        "Data", "the text that the best checkpoint is chosen on; else the end of the data", None
    )
    test_data: str | None = field_of("Data", "the text that is reported on; else that of eval_data", None)
    text_columns: Names = field_of("Data", "the column that holds the text; else found by name", ())
    level: Literal["word", "character"] = field_of(
        "Data", "what a token is; characters are a to z and the space", "word"
    )
    vocabulary: Count | None = field_of("Data", "most words that are known, the most frequent ones; else all", None)

    architecture: Literal["all-attention", "transformer-xl"] = field_of("Model", "the family", "all-attention")
    layers: Count = field_of("Model", "layers", 16)
    hidden: Count = field_of("Model", "width of the model", 512)
    heads: Count = field_of("Model", "heads of a layer", 8)
    persistent: Annotated[int, Field(ge=0)] = field_of(
        "Model", "persistent vectors of a head; as the inner width of transformer-xl's feed-forward layer", 2048
    )
    memory: Annotated[int, Field(ge=0)] = field_of("Model", "positions of earlier segments that a layer remembers", 192)
    attention_dropout: Share = field_of("Model", "dropout of attention maps", 0.2)
    embedding_dropout: Share = field_of("Model", "dropout of embeddings", 0.1)
    hidden_dropout: Share = field_of("Model", "dropout of what a layer adds", 0.1)

    steps: Count = field_of("Training", "optimizer steps", 160_000)
    batch_size: Count = field_of("Training", "streams side by side, a process", 96)
    segment: Annotated[int, Field(ge=1)] = field_of("Training", "tokens of every stream a step", 192)
    optimizer: Literal["lamb", "adamw"] = field_of("Training", "LAMB or AdamW", "lamb")
    learning_rate: Annotated[float, Field(gt=0)] = field_of("Training", "peak learning rate", 1e-2)
    final_learning_rate: Annotated[float, Field(ge=0)] = field_of("Training", "where its cosine ends", 1e-4)
    warmup: Share = field_of("Training", "share of the steps over which it rises", 0.025)
    weight_decay: Annotated[float, Field(ge=0)] = field_of("Training", "of matrices", 0.0)
    max_grad_norm: Annotated[float, Field(gt=0)] = field_of("Training", "bound on the norm of the gradient", 1.0)
    mixed_precision: Literal["auto", "no", "bf16"] = field_of(
        "Training", "what matrices are multiplied in; auto: bf16 where the device has it", "auto"
    )
    evaluations: Count = field_of("Training", "evaluations, evenly spaced; a checkpoint goes with each", 20)
    seed: Annotated[int, Field(ge=0)] = field_of("Training", "seed of everything that is drawn", 0)

    @pydantic.model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.hidden % self.heads or self.hidden % 2:
            raise ValueError(f"hidden {self.hidden}: give an even multiple of heads {self.heads}")
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate {self.final_learning_rate:g}: the rate falls to it from learning_rate"
                f" {self.learning_rate:g}; give a smaller one"
            )
        if self.vocabulary is not None and self.level == "character":
            raise ValueError(f"vocabulary {self.vocabulary}: characters are a to z and the space; leave it out")
        return self

    # What rows are read by (`DataRequest`).
    @property
    def label_column(self) -> None:
        return None

    @property
    def metric(self) -> None:
        return None

    @property
    def max_length(self) -> int:
        return self.segment

    @property
    def stride(self) -> int:
        return 0


def make(**flags: Any) -> Training:
    """The training that flags ask for.

    Raises:
        UsageError: a value is out of its range; one line says which.
    """
    try:
        return Training.model_validate(flags)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = " ".join(str(first["msg"]).removeprefix("Value error, ").split())
        name = str(first["loc"][0]) if first["loc"] else ""
        if not name:
            field = said.split()[0]
            raise UsageError(said.replace(field, flag_of(field), 1)) from error
        hint = Training.model_fields[name].description
        raise UsageError(f"{flag_of(name)} {first['input']!r}: {said[0].lower()}{said[1:]} ({hint})") from error
