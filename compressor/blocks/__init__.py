"""Which blocks of the attention map to drop: watch average maps, cut masks from them, learn on with the masks."""

from compressor.blocks.cut import cut, density, unreached
from compressor.blocks.maps import AttentionMaps
from compressor.blocks.watch import watch

__all__ = ["AttentionMaps", "cut", "density", "unreached", "watch"]
