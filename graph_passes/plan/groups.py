"""The plan of one group of units: the heads of an attention site, or the neurons of a feed-forward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Kind = Literal["bidirectional", "causal", "cross"]
"""Kind of an attention: self-attention without a causal mask, self-attention with one, or attention to another
sequence."""

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=STRICT)
class SitePlan:
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
        _check_kept(self)

    @property
    def units(self) -> int:
        """Number of units of the unpruned model: its query heads."""
        return self.heads

    @property
    def width(self) -> int:
        """Consecutive elements of the gated tensor that belong to one unit."""
        return self.head_dim

    @property
    def dropped(self) -> tuple[int, ...]:
        """Original ids of the heads that are removed, ascending."""
        return _dropped(self)

    @property
    def gate(self) -> tuple[float, ...]:
        """The gate of each head, `[heads]`: its scale if it is kept, else zero."""
        return _gate(self)


@dataclass(frozen=True, config=STRICT)
class NeuronPlan:
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

    def __post_init__(self) -> None:
        _check_kept(self)

    @property
    def width(self) -> int:
        """Consecutive elements of the gated tensor that belong to one unit."""
        return 1

    @property
    def dropped(self) -> tuple[int, ...]:
        """Original ids of the neurons that are removed, ascending."""
        return _dropped(self)

    @property
    def gate(self) -> tuple[float, ...]:
        """The gate of each neuron, `[units]`: its scale if it is kept, else zero."""
        return _gate(self)


GroupPlan = SitePlan | NeuronPlan
"""The plan of one group of units."""
GroupType = Literal["heads", "neurons"]
"""Type of the units of a group."""


def _check_kept(group: GroupPlan) -> None:
    """Check the kept units of a group, and fill in scales of one.

    Raises:
        ValueError: a kept unit does not exist or is repeated, or there is not one scale for each kept unit.
    """
    if list(group.kept) != sorted(set(group.kept)):
        raise ValueError(f"{group.name}: kept {group.type} {list(group.kept)} must be ascending and without repeats")
    if group.kept and group.kept[-1] >= group.units:
        raise ValueError(
            f"{group.name}: {group.type[:-1]} {group.kept[-1]} is out of range, the group has {group.type} 0 to"
            f" {group.units - 1}"
        )
    if not group.scale and group.kept:
        object.__setattr__(group, "scale", (1.0,) * len(group.kept))
    if len(group.scale) != len(group.kept):
        raise ValueError(f"{group.name}: {len(group.scale)} scales for {len(group.kept)} kept {group.type}")


def _dropped(group: GroupPlan) -> tuple[int, ...]:
    kept = set(group.kept)
    return tuple(unit for unit in range(group.units) if unit not in kept)


def _gate(group: GroupPlan) -> tuple[float, ...]:
    scale = dict(zip(group.kept, group.scale, strict=True))
    return tuple(scale.get(unit, 0.0) for unit in range(group.units))
