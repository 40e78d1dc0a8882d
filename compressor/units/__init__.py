"""Units of a model: find heads and neurons, gate them, mask attention maps, observe the outputs of heads.

Families that call transformers' attention interface are served by one hook, see `compressor.units.hook`; others at the
projections that read their heads, see `compressor.units.projections`.
"""

from compressor.units.compact import Compaction, compacted
from compressor.units.find import find_sites
from compressor.units.gating import check_plan, gated, hooked, keep_all, keep_only
from compressor.units.groups import Bundles, PrunableGroup, expert_weights, find_groups
from compressor.units.hook import Attention, OutputHook, WeightsHook
from compressor.units.masking import masked
from compressor.units.projections import Site

__all__ = [
    "Attention",
    "Bundles",
    "Compaction",
    "OutputHook",
    "PrunableGroup",
    "Site",
    "WeightsHook",
    "check_plan",
    "compacted",
    "expert_weights",
    "find_groups",
    "find_sites",
    "gated",
    "hooked",
    "keep_all",
    "keep_only",
    "masked",
]
