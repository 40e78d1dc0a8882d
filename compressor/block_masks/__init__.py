"""Selection of blocks of attention maps to drop: average the maps, derive masks, train the model with the masks."""

from compressor.block_masks.attention_maps import AttentionMaps, build_masks, density, unreached_share
from compressor.block_masks.collect_maps import collect_attention_maps

__all__ = ["AttentionMaps", "build_masks", "collect_attention_maps", "density", "unreached_share"]
