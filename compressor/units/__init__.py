"""Attention sites of a model: find them, gate their heads, mask their maps, observe their outputs.

Every family that calls transformers' attention interface is served by one hook; see `compressor.units.hook`.
"""

from compressor.units.find import Site, find_sites
from compressor.units.gating import check_plan, gated, keep_all, keep_only
from compressor.units.hook import Attention, OutputHook, WeightsHook, hooked
from compressor.units.masking import masked

__all__ = [
    "Attention",
    "OutputHook",
    "Site",
    "WeightsHook",
    "check_plan",
    "find_sites",
    "gated",
    "hooked",
    "keep_all",
    "keep_only",
    "masked",
]
