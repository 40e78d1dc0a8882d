"""The sections of a recipe, and its fields by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field
from pydantic.fields import FieldInfo

from compressor.config.fields import Config
from compressor.config.sections import (
    AUTO,
    BlocksConfig,
    BudgetConfig,
    DistillationConfig,
    EngineConfig,
    ExportConfig,
    MeasureConfig,
    OutputConfig,
    RowsConfig,
    SelectionConfig,
    SourceConfig,
)
from compressor.targets import WEIGHT_BITS

if TYPE_CHECKING:
    from compressor.results import Report


class Sections(Config):
    """The sections of a recipe."""

    source: SourceConfig
    rows: RowsConfig = Field(default_factory=RowsConfig)
    selection: SelectionConfig = Field(default_factory=SelectionConfig)
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    blocks: BlocksConfig = Field(default_factory=BlocksConfig)
    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    export: ExportConfig = Field(default_factory=ExportConfig)
    measure: MeasureConfig = Field(default_factory=MeasureConfig)
    output: OutputConfig = Field(default_factory=OutputConfig)


SECTIONS: Mapping[str, type[Config]] = {
    name: cast(type[Config], section.annotation) for name, section in Sections.model_fields.items()
}
"""Section -> its model."""
FIELDS: Mapping[str, FieldInfo] = {
    name: field for section in SECTIONS.values() for name, field in section.model_fields.items()
}
"""Every field of a recipe by name, in the order of sections."""
SECTION_OF: Mapping[str, str] = {name: key for key, section in SECTIONS.items() for name in section.model_fields}
"""Field name -> section."""
BUILD_FIELDS = (*EngineConfig.model_fields, *MeasureConfig.model_fields)
"""Fields that decide how a graph is built and timed; `compress build` takes these."""
BUDGETS = ("speedup", "latency", "macs", "parameters")
"""Fields that each set a budget."""


def definite_fields(report: Report) -> dict[str, Any]:
    """Fields of the recipe of a report, with target and precision of the delivered engine that reads whole texts.

    The recipe may have left them to the run, or name a precision of the weights of the engine with caches.
    """
    delivered = {"target": report.target, "precision": report.precision}
    others = (AUTO, *WEIGHT_BITS)
    return report.recipe | {name: value for name, value in delivered.items() if report.recipe.get(name) in others}
