"""Gates that are learned by gradient. To add one: write its class, and add one line to `config.methods`."""

from compressor.selection.gates.base import Gate, PerKindGate, RankedGate

__all__ = ["Gate", "PerKindGate", "RankedGate"]
