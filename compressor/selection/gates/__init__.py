"""Gates that are learned by gradient, one file a gate. To add one: write its file, add one line to `config.methods`."""

from compressor.selection.gates.base import Gate, RankedGate
from compressor.selection.gates.bin_concrete import BinConcreteGate, BinConcreteOptions
from compressor.selection.gates.dsp import DspGate, DspOptions
from compressor.selection.gates.hard_concrete import HardConcreteGate, HardConcreteOptions
from compressor.selection.gates.per_kind import PerKindGate
from compressor.selection.gates.ste import StraightThroughGate, StraightThroughOptions

__all__ = [
    "BinConcreteGate",
    "BinConcreteOptions",
    "DspGate",
    "DspOptions",
    "Gate",
    "HardConcreteGate",
    "HardConcreteOptions",
    "PerKindGate",
    "RankedGate",
    "StraightThroughGate",
    "StraightThroughOptions",
]
