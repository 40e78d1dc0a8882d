"""Attention maps with random numbers, and plans of one site."""

from __future__ import annotations

import numpy as np

from compressor.block_masks.attention_maps import AttentionMaps
from graph_passes import Kind, Plan, SitePlan


def random_maps(
    kind: Kind = "bidirectional", heads: int = 3, length: int = 20, memory: int = 0, seed: int = 0
) -> AttentionMaps:
    """Maps of the site `a`, whose pairs of positions all have one row."""
    shape = (length, length + memory)
    array = np.random.default_rng(seed).random((heads, *shape)).astype(np.float32)
    return AttentionMaps({"a": array}, {"a": np.ones(shape, np.float32)}, {"a": kind}, memory, "sha256:m", "sha256:d")


def plan_of(kind: Kind = "bidirectional", heads: int = 3, kept: tuple[int, ...] = (0, 1, 2)) -> Plan:
    """A plan of the site `a`."""
    return Plan(sites=(SitePlan("a", kind, heads, heads, 4, kept),))
