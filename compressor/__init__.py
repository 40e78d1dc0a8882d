"""Prune, distill and quantize transformers for the machine that serves them, and prove and measure the result."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.config.run import Recipe
    from compressor.config.sections import EngineConfig as Engine
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
    from compressor.run.model_units import measure_costs
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
    "Engine",
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

_NAMES = {
    "compressor.models": (
        "AllAttentionConfig",
        "AllAttentionForCausalLM",
        "TransformerXLConfig",
        "TransformerXLForCausalLM",
    ),
    "compressor.config.steps": ("Blocks", "Distill", "Follow", "Heads", "Units", "Within"),
    "compressor.pruning.allocate": ("Constraint", "allocate_until_met"),
    "compressor.measure.costs": ("CostTable",),
    "compressor.training.distillation": ("Distillation",),
    "compressor.selection.pruners.fisher": ("FisherPruner",),
    "compressor.selection.pruners.unit_importance": ("MagnitudePruner",),
    "compressor.units": ("PrunableGroup", "Site", "find_groups", "find_sites", "gated"),
    "compressor.selection.pruners.base": ("PruningInputs",),
    "compressor.config.run": ("Recipe",),
    "compressor.config.sections": ("Engine",),
    "compressor.selection.pruners.reconstruct.pruner": ("ReconstructPruner",),
    "compressor.results": ("Report",),
    "compressor.targets.segment_stream": ("Stream",),
    "compressor.selection.allocation": ("allocate",),
    "compressor.run.pipeline": ("compress",),
    "compressor.run.ladder": ("compress_ladder",),
    "compressor.export": ("export_reference",),
    "compressor.generation.runner": ("load_engine",),
    "compressor.run.model_units": ("measure_costs",),
    "compressor.targets": ("target",),
}
_RENAMED = {"Engine": "EngineConfig"}
"""Name -> that in its module, where the package has other engines."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Resolved on first use: `import compressor` and `compress --help` need not wait for torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_MODULES[name]), _RENAMED.get(name, name))
    except ModuleNotFoundError as error:
        from compressor.environment import missing_pytorch

        if (missing := missing_pytorch(error)) is None:
            raise
        raise missing from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
