"""The plan of one group of units: the heads of an attention site, or the neurons of a feed-forward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Kind = Literal["bidirectional", "causal", "cross"]
"""Kind of an attention: self-attention without a causal mask, self-attention with one, or attention to another
sequence."""

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


class _Units:
    """The common part of the plans of all types of groups."""

    name: str
    type: str
    units: int
    kept: tuple[int, ...]
    scale: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the kept units, and fill in scales of one.

        Raises:
            ValueError: a kept unit does not exist or is repeated, or there is not one scale for each kept unit.
        """
        if list(self.kept) != sorted(set(self.kept)):
            raise ValueError(f"{self.name}: kept {self.type} {list(self.kept)} must be ascending and without repeats")
        if self.kept and self.kept[-1] >= self.units:
            raise ValueError(
                f"{self.name}: {self.type[:-1]} {self.kept[-1]} is out of range, the group has {self.type} 0 to"
                f" {self.units - 1}"
            )
        if not self.scale and self.kept:
            object.__setattr__(self, "scale", (1.0,) * len(self.kept))
        if len(self.scale) != len(self.kept):
            raise ValueError(f"{self.name}: {len(self.scale)} scales for {len(self.kept)} kept {self.type}")

    @property
    def dropped(self) -> tuple[int, ...]:
        """Original ids of the units that are removed, ascending."""
        return tuple(sorted(set(range(self.units)).difference(self.kept)))

    @property
    def gate(self) -> tuple[float, ...]:
        """The gate of each unit, `[units]`: its scale if it is kept, else zero."""
        scale = dict(zip(self.kept, self.scale, strict=True))
        return tuple(scale.get(unit, 0.0) for unit in range(self.units))


@dataclass(frozen=True, config=STRICT)
class SitePlan(_Units):
    """The plan of one attention site.

    Attributes:
        name: module path of the attention module, e.g. `bert.encoder.layer.0.attention.self`, or of the projection that
            reads its heads, e.g. `mpnet.encoder.layer.0.attention.attn.o`.
        kind: `bidirectional`, `causal` (both self-attention) or `cross`.
        heads: number of query heads of the unpruned model.
        kv_heads: number of key/value heads of the unpruned model; divides `heads`.
        head_dim: width of one head's value vector.
        kept: original ids of the kept heads, ascending. Empty: the whole attention is removed.
        scale: the gate of each kept head, in the order of `kept`; by default all ones.
        mask: name of a tensor in the `.safetensors` file beside the plan; None: every pair of positions is computed.
        block: positions along each side of a block of the mask.
        memory: number of key positions before position 0 that the mask covers.
        type: `heads`.

    Raises:
        ValueError: `kv_heads` does not divide `heads`, a kept head does not exist or is repeated, or there is not one
            scale for each kept head.
    """

    name: Annotated[str, Field(min_length=1)]
    kind: Kind
    heads: Annotated[int, Field(gt=0)]
    kv_heads: Annotated[int, Field(gt=0)]
    head_dim: Annotated[int, Field(gt=0)]
    kept: tuple[Annotated[int, Field(ge=0)], ...]
    scale: tuple[float, ...] = ()
    mask: str | None = None
    block: Annotated[int, Field(gt=0)] = 1
    memory: Annotated[int, Field(ge=0)] = 0

    type: Literal["heads"] = "heads"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.kv_heads} key/value heads do not divide {self.heads} heads")
        super().__post_init__()

    @property
    def units(self) -> int:  # type: ignore[override]
        """Number of units of the unpruned model: its query heads."""
        return self.heads

    @property
    def width(self) -> int:
        """Consecutive elements of the gated tensor that belong to one unit."""
        return self.head_dim


@dataclass(frozen=True, config=STRICT)
class NeuronPlan(_Units):
    """The plan of one feed-forward.

    Attributes:
        name: module path of the linear that reads the neurons, e.g. `bert.encoder.layer.0.output.dense`.
        units: number of neurons of the unpruned model: inputs of the linear.
        kept: original ids of the kept neurons, ascending. Empty: only the output bias of the feed-forward remains.
        scale: the gate of each kept neuron, in the order of `kept`; by default all ones.
        type: `neurons`.

    Raises:
        ValueError: a kept neuron does not exist or is repeated, or there is not one scale for each kept neuron.
    """

    name: Annotated[str, Field(min_length=1)]
    units: Annotated[int, Field(gt=0)]
    kept: tuple[Annotated[int, Field(ge=0)], ...]
    scale: tuple[float, ...] = ()
    type: Literal["neurons"] = "neurons"

    @property
    def width(self) -> int:
        """Consecutive elements of the gated tensor that belong to one unit."""
        return 1


GroupPlan = SitePlan | NeuronPlan
"""The plan of one group of units."""
GroupType = Literal["heads", "neurons"]
"""Type of the units of a group."""
