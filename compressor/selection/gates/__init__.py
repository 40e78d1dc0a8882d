"""Gates that are learned by gradient, one file a gate. To add one: write its file, add one line to `config.methods`."""

from compressor.selection.gates.base import Gate, RankedGate
from compressor.selection.gates.per_kind import PerKindGate

__all__ = ["Gate", "PerKindGate", "RankedGate"]
