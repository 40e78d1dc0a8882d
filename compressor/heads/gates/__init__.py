"""Gates learned by gradient, one file a gate. To add one: write the file, add one line to `GATES`."""

from collections.abc import Callable
from dataclasses import dataclass

from compressor.heads.gates.base import Gate
from compressor.heads.gates.bin_concrete import BinConcreteGate
from compressor.heads.gates.dsp import SubsetGate
from compressor.heads.gates.hard_concrete import HardConcreteGate
from compressor.heads.gates.pooled import PooledGate
from compressor.heads.gates.ste import StraightThroughGate


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
    "dsp": GateMethod(SubsetGate),
    "dsp-pipelined": GateMethod(SubsetGate, trains_model=False, epochs=1.0),
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
