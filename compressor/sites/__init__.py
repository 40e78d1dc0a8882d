"""Attention sites of a model: find them, gate them, watch them. One hook serves every family that has it."""

from compressor.sites.find import Site, find_sites
from compressor.sites.gates import check_plan, gated, keep_all, keep_only
from compressor.sites.hook import Attention, OutputHook, WeightsHook, hooked
from compressor.sites.masks import masked

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
