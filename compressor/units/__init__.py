"""Units of a model: find heads and neurons, gate them, mask attention maps, observe the outputs of heads.

Families that call transformers' attention interface are served by one hook, see `compressor.units.hook`; others at the
projections that read their heads, see `compressor.units.projections`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.units.compact import Compaction, compacted
    from compressor.units.find import find_sites
    from compressor.units.gating import gated, hooked
    from compressor.units.groups import Bundles, expert_weights, find_groups
    from compressor.units.hook import Attention, OutputHook, WeightsHook
    from compressor.units.masking import masked
    from compressor.units.prunable import PrunableGroup, Site, check_plan, keep_all, keep_only

__all__ = ["Attention", "Bundles", "Compaction", "OutputHook", "PrunableGroup", "Site", "WeightsHook"]
__all__ += ["check_plan", "compacted", "expert_weights", "find_groups", "find_sites", "gated", "hooked"]
__all__ += ["keep_all", "keep_only", "masked"]

_MODULES = {
    "compact": ("Compaction", "compacted"),
    "find": ("find_sites",),
    "gating": ("gated", "hooked"),
    "groups": ("Bundles", "expert_weights", "find_groups"),
    "hook": ("Attention", "OutputHook", "WeightsHook"),
    "masking": ("masked",),
    "prunable": ("PrunableGroup", "Site", "check_plan", "keep_all", "keep_only"),
}


def __getattr__(name: str) -> Any:
    # Resolved on first use: groups and sites are read where PyTorch is not installed.
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
