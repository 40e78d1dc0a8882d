"""Gates learned by gradient, one file a gate. To add one: write the file, add one line to `GATES`."""

from collections.abc import Callable
from dataclasses import dataclass

from compressor.selection.gates.base import Gate
from compressor.selection.gates.bin_concrete import BinConcreteGate
from compressor.selection.gates.dsp import DspGate
from compressor.selection.gates.hard_concrete import HardConcreteGate
from compressor.selection.gates.per_kind import PooledGate
from compressor.selection.gates.ste import StraightThroughGate


@dataclass(frozen=True)
class GateMethod:
    """A gate and what learns with it.

    Attributes:
        make: called as `(layers, keep, steps, seed, **options)`.
        trains_model: False: the model is frozen and the gate alone learns (pipelined, not joint).
        epochs: passes over the training rows where the recipe does not say.
    """

    make: Callable[..., Gate]
    trains_model: bool = True
    epochs: float = 3.0


GATES: dict[str, GateMethod] = {
    "dsp": GateMethod(DspGate),
    "dsp-pipelined": GateMethod(DspGate, trains_model=False, epochs=1.0),
    "ste": GateMethod(StraightThroughGate),
    "hard-concrete": GateMethod(HardConcreteGate),
    "bin-concrete": GateMethod(BinConcreteGate),
}
"""Method name -> gate."""

__all__ = [
    "GATES",
    "BinConcreteGate",
    "Gate",
    "GateMethod",
    "HardConcreteGate",
    "PooledGate",
    "StraightThroughGate",
    "SubsetGate",
]
