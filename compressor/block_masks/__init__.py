"""Which blocks of the attention map to drop: watch average maps, cut masks from them, learn on with the masks."""

from compressor.block_masks.attention_maps import AttentionMaps
from compressor.block_masks.collect_maps import watch
from compressor.block_masks.masks_from_maps import cut, density, unreached

__all__ = ["AttentionMaps", "cut", "density", "unreached", "watch"]
