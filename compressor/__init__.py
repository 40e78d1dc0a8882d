"""Make transformers smaller and faster where they are deployed, and prove it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.config.run import Recipe
    from compressor.config.steps import Blocks, Distill, Follow, Heads, Units, Within
    from compressor.export import export_reference
    from compressor.generation.runner import load_engine
    from compressor.measure.costs import CostTable
    from compressor.models import (
        AllAttentionConfig,
        AllAttentionForCausalLM,
        TransformerXLConfig,
        TransformerXLForCausalLM,
    )
    from compressor.pruning.allocate import Constraint, allocate_until_met
    from compressor.results import Report
    from compressor.run.ladder import compress_ladder
    from compressor.run.model_costs import measure_costs
    from compressor.run.pipeline import compress
    from compressor.selection.allocation import allocate
    from compressor.selection.pruners.base import PruningInputs
    from compressor.selection.pruners.fisher import FisherPruner
    from compressor.selection.pruners.reconstruct.pruner import ReconstructPruner
    from compressor.selection.pruners.unit_importance import MagnitudePruner
    from compressor.targets import target
    from compressor.targets.segment_stream import Stream
    from compressor.training.distillation import Distillation
    from compressor.units import PrunableGroup, Site, find_groups, find_sites, gated

__all__ = [
    "AllAttentionConfig",
    "AllAttentionForCausalLM",
    "Blocks",
    "Constraint",
    "CostTable",
    "Distill",
    "Distillation",
    "FisherPruner",
    "Follow",
    "Heads",
    "MagnitudePruner",
    "PrunableGroup",
    "PruningInputs",
    "Recipe",
    "ReconstructPruner",
    "Report",
    "Site",
    "Stream",
    "TransformerXLConfig",
    "TransformerXLForCausalLM",
    "Units",
    "Within",
    "allocate",
    "allocate_until_met",
    "compress",
    "compress_ladder",
    "export_reference",
    "find_groups",
    "find_sites",
    "gated",
    "load_engine",
    "measure_costs",
    "target",
]

_MODULES = {
    "AllAttentionConfig": "compressor.models",
    "AllAttentionForCausalLM": "compressor.models",
    "Blocks": "compressor.config.steps",
    "Constraint": "compressor.pruning.allocate",
    "CostTable": "compressor.measure.costs",
    "Distill": "compressor.config.steps",
    "Distillation": "compressor.training.distillation",
    "FisherPruner": "compressor.selection.pruners.fisher",
    "Follow": "compressor.config.steps",
    "Heads": "compressor.config.steps",
    "MagnitudePruner": "compressor.selection.pruners.unit_importance",
    "PrunableGroup": "compressor.units",
    "PruningInputs": "compressor.selection.pruners.base",
    "Recipe": "compressor.config.run",
    "ReconstructPruner": "compressor.selection.pruners.reconstruct.pruner",
    "Report": "compressor.results",
    "Site": "compressor.units",
    "Stream": "compressor.targets.segment_stream",
    "TransformerXLConfig": "compressor.models",
    "TransformerXLForCausalLM": "compressor.models",
    "Units": "compressor.config.steps",
    "Within": "compressor.config.steps",
    "allocate": "compressor.selection.allocation",
    "allocate_until_met": "compressor.pruning.allocate",
    "compress": "compressor.run.pipeline",
    "compress_ladder": "compressor.run.ladder",
    "export_reference": "compressor.export",
    "find_groups": "compressor.units",
    "find_sites": "compressor.units",
    "gated": "compressor.units",
    "load_engine": "compressor.generation.runner",
    "measure_costs": "compressor.run.model_costs",
    "target": "compressor.targets",
}


def __getattr__(name: str) -> Any:
    # Resolved on first use: `import compressor` and `compress --help` need not wait for torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from compressor.environment import missing_pytorch

        if (missing := missing_pytorch(error)) is None:
            raise
        raise missing from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
