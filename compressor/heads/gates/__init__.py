"""Gates learned by gradient, one file a gate. To add one: write the file, add one line to `GATES`."""

from collections.abc import Callable

from compressor.heads.gates.base import Gate
from compressor.heads.gates.dsp import SubsetGate
from compressor.heads.gates.pooled import PooledGate

GATES: dict[str, Callable[..., Gate]] = {
    "dsp": SubsetGate,
}
"""Method name -> gate, called as `(layers, keep, steps, seed, **options)`."""

__all__ = ["GATES", "Gate", "PooledGate", "SubsetGate"]
