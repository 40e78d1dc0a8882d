"""The sections of a recipe, its fields by name, and their names in earlier versions."""

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
FORMER_NAMES: Mapping[str, str] = {
    "blocks": "drop_blocks",
    "prune": "drop_blocks_by_kind",
    "watch_rows": "map_rows",
    "weigh_by_rows": "weight_by_count",
    "empty_rows": "allow_empty_rows",
    "everywhere": "mask_all_sites",
    "restart": "from_original_weights",
    "guarantee": "certify",
}
"""Names of fields in version 0.1 -> names today."""
BUDGETS = ("speedup", "latency", "macs", "parameters")
"""Fields that each set a budget."""


def current_fields(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recipe stored in a report, flat, under their current names and with current kinds of attention."""
    fields = {FORMER_NAMES.get(name, name): value for name, value in stored.items()}
    from graph_passes.plan import current_kind  # imported here: the graph libraries take long to load

    if shares := fields.get("drop_blocks_by_kind"):
        fields["drop_blocks_by_kind"] = {current_kind(kind): share for kind, share in shares.items()}
    return fields


def definite_fields(report: Report) -> dict[str, Any]:
    """Fields of the recipe of a report; where the run chose its engine, target and precision are those delivered."""
    fields = current_fields(report.recipe)
    delivered = {"target": report.target, "precision": report.precision}
    return {**fields, **{name: value for name, value in delivered.items() if fields.get(name) == AUTO}}
