"""The sections of a recipe: one frozen model for each stage that reads it."""

from compressor.config.sections.blocks import BlocksConfig
from compressor.config.sections.budget import BudgetConfig
from compressor.config.sections.data import ROW_SOURCES, RowsConfig, SourceConfig
from compressor.config.sections.distillation import DistillationConfig
from compressor.config.sections.engine import EngineConfig, ExportConfig
from compressor.config.sections.headings import (
    AUTO,
    BLOCKS,
    BUDGET,
    DATA,
    DISTILLATION,
    ENGINE,
    HEADINGS,
    HEADS,
    MEASURING,
    MODEL,
    OUTPUT,
)
from compressor.config.sections.output import MeasureConfig, OutputConfig
from compressor.config.sections.selection import SelectionConfig

__all__ = [
    "AUTO",
    "BLOCKS",
    "BUDGET",
    "DATA",
    "DISTILLATION",
    "ENGINE",
    "HEADINGS",
    "HEADS",
    "MEASURING",
    "MODEL",
    "OUTPUT",
    "ROW_SOURCES",
    "BlocksConfig",
    "BudgetConfig",
    "DistillationConfig",
    "EngineConfig",
    "ExportConfig",
    "MeasureConfig",
    "OutputConfig",
    "RowsConfig",
    "SelectionConfig",
    "SourceConfig",
]
