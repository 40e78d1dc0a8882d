"""How the compressed model is trained on the outputs of a whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from compressor.config.fields import Config, config_field
from compressor.config.sections.headings import DISTILLATION
from compressor.config.values import Count, NonNegative, Positive


class DistillationConfig(Config):
    """How the compressed model is trained on the outputs of a whole one."""

    distill: bool = config_field(
        DISTILLATION,
        "train the compressed model on the outputs and hidden states of the whole model, without labels",
        False,
        decides_plan=True,
        is_basic=True,
    )
    teacher: Path | None = config_field(
        DISTILLATION,
        "folder of the model whose outputs are learned, with the layers and widths of MODEL; default: MODEL",
        decides_plan=True,
        is_path=True,
    )
    distill_steps: Count = config_field(
        DISTILLATION, "training steps of the distillation; in a ladder, of each rung", 2000, decides_plan=True
    )
    distill_learning_rate: Positive = config_field(
        DISTILLATION, "peak learning rate of the distillation", 2e-4, decides_plan=True
    )
    minutes: Positive | None = config_field(
        DISTILLATION,
        "maximum minutes of the distillation, of a ladder in all; with fewer training steps where needed",
        decides_plan=True,
        is_basic=True,
    )
    teacher_outputs: Path | None = config_field(
        DISTILLATION,
        "folder that keeps the outputs of the teacher for runs on the same examples; default: kept only within a"
        " run that reads its examples several times, or within a ladder",
        is_path=True,
    )
    augment: Annotated[float, Field(ge=0, le=1)] = config_field(
        DISTILLATION,
        "share of the training examples of the distillation that are replaced by a cut of one or by joined parts"
        " of two, with the lengths of the evaluation examples (classification and regression)",
        0.0,
        decides_plan=True,
    )
    quantized_share: Annotated[float, Field(ge=0, le=1)] = config_field(
        DISTILLATION,
        "share of the training steps, the last ones, in which linears round as the engine does, to 8 bits or to"
        " bfloat16; needs --precision int8, bf16 or auto",
        0.0,
        decides_plan=True,
    )
    temperature: Positive = config_field(
        DISTILLATION, "temperature that divides the logits of both models", 2.0, decides_plan=True
    )
    hidden_weight: NonNegative = config_field(
        DISTILLATION,
        "weight of the relative error of the hidden states beside the divergence of the outputs",
        1.0,
        decides_plan=True,
    )
