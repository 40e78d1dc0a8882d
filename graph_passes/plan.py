"""The pruning plan: which units of each group are kept, with which scales and masks.

Learning writes plans, and the graph passes read them. A group is a set of interchangeable units at one point of the
model: the heads of an attention site, or the neurons of a feed-forward. A plan lists groups by their module paths, the
original ids of the kept units, and one scale for each kept unit. It is JSON with a published schema
(`Plan.model_json_schema()`), against which it is validated when it is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
import pydantic
import pydantic.dataclasses
import safetensors.numpy
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from pydantic_core import ErrorDetails
from safetensors import SafetensorError

from graph_passes.block_sparse.masks import BlockMask
from graph_passes.errors import GraphErrorCode, PlanError
from graph_passes.files import atomic_replace, write_text
from graph_passes.weights import WeightRecord

Kind = Literal["bidirectional", "causal", "cross"]
"""Kind of an attention: self-attention without a causal mask, self-attention with one, or attention to another
sequence."""

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


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


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
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


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
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


class Plan(BaseModel):
    """The plan of the groups of one model, and where it came from.

    `Plan(sites=...)` is a plan with attention sites only.

    Attributes:
        version: version of the file format. Version 1, which had `sites` in place of `groups`, is still read.
        groups: one entry for each attention site, in the order in which the model calls them, and for feed-forwards. A
            feed-forward without an entry keeps every neuron.
        model: fingerprint of the model's weights and configuration (`sha256:...`); None: the plan is for any model.
        method: the method that chose the units (`dsp`, `taylor`, ...), or None.
        options: the method's options.
        seed: the run's seed.
        data: hash of the training rows (`sha256:...`), or None.
        evidence: metric before and after by split, e.g.
            `{"test": {"metric": "accuracy", "rows": 346, "dense": 0.87, "compressed": 0.86}}`.
        weights: name of a parameter -> its fingerprints: of those that the run trained or refitted, and of the weights
            that read neurons. Empty where the run changed none; then the graph must hold the weights of the plan.
    """

    model_config = ConfigDict(frozen=True, **_STRICT)

    version: Literal[2] = 2
    groups: tuple[Annotated[GroupPlan, Field(discriminator="type")], ...]
    model: str | None = None
    method: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    seed: int | None = None
    data: str | None = None
    evidence: dict[str, Any] = Field(default_factory=dict)
    weights: dict[str, WeightRecord] = Field(default_factory=dict)
    _masks: dict[str, BlockMask] = PrivateAttr(default_factory=dict)

    if TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None: ...

    @pydantic.model_validator(mode="before")
    @classmethod
    def _sites_are_groups(cls, fields: Any) -> Any:
        """Read version 1, and plans that are constructed from sites."""
        if not isinstance(fields, dict) or "groups" in fields:
            return fields
        fields = {**fields, "version": 2} if fields.get("version") == 1 else dict(fields)
        if "sites" in fields:
            sites = fields.pop("sites")
            if isinstance(sites, (list, tuple)):
                sites = [{"type": "heads", **site} if isinstance(site, dict) else site for site in sites]
            fields["groups"] = sites
        return fields

    @pydantic.model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [group.name for group in self.groups]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"group {repeated[0]} is listed twice, but a group has one entry")
        return self

    @property
    def sites(self) -> tuple[SitePlan, ...]:
        """The attention sites, in the order in which the model calls them."""
        return tuple(group for group in self.groups if isinstance(group, SitePlan))

    @property
    def feed_forwards(self) -> tuple[NeuronPlan, ...]:
        """The feed-forwards, in the order in which the model calls them."""
        return tuple(group for group in self.groups if isinstance(group, NeuronPlan))

    def replace_groups(self, groups: Iterable[GroupPlan]) -> Plan:
        """A copy of the plan in which these groups replace those of the same names.

        Raises:
            ValueError: the plan has no group of such a name.
        """
        replacements = {group.name: group for group in groups}
        if unknown := replacements.keys() - {group.name for group in self.groups}:
            raise ValueError(f"{min(unknown)}: the plan has no group of this name")
        return self.model_copy(update={"groups": tuple(replacements.get(group.name, group) for group in self.groups)})

    @property
    def counts(self) -> dict[str, int]:
        """Name of the group -> number of kept units."""
        return {group.name: len(group.kept) for group in self.groups}

    @property
    def heads(self) -> int:
        """Number of heads of the unpruned model, over all sites."""
        return sum(site.heads for site in self.sites)

    @property
    def heads_kept(self) -> int:
        """Number of kept heads, over all sites."""
        return sum(len(site.kept) for site in self.sites)

    @property
    def drops_any(self) -> bool:
        """Whether a unit or a block of an attention map is dropped, or a unit is scaled."""
        return bool(self._masked_sites) or any(group.gate != (1.0,) * group.units for group in self.groups)

    @property
    def neurons(self) -> int:
        """Number of neurons of the unpruned model, over all feed-forwards of the plan."""
        return sum(group.units for group in self.feed_forwards)

    @property
    def neurons_kept(self) -> int:
        """Number of kept neurons, over all feed-forwards of the plan."""
        return sum(len(group.kept) for group in self.feed_forwards)

    def require_masks(self) -> None:
        """Check that the masks which sites name are there: a plan that was read from JSON alone has none.

        Raises:
            PlanError: the mask of a site is missing.
        """
        for site in self._masked_sites:
            if site.name not in self._masks:
                raise PlanError(
                    f"the mask of site {site.name} is missing; read the plan with Plan.load, which reads its masks",
                    code=GraphErrorCode.MASK_MISSING,
                    site=site.name,
                )

    @property
    def _masked_sites(self) -> list[SitePlan]:
        return [site for site in self.sites if site.mask is not None]

    @property
    def masks(self) -> Mapping[str, BlockMask]:
        """The masks by name of the site, for the sites that have one."""
        return self._masks

    def masked(self, masks: Mapping[str, BlockMask]) -> Plan:
        """A copy of the plan with these masks and no others.

        Args:
            masks: name of the site -> mask.

        Raises:
            PlanError: a mask is for a site that the plan lacks, or has another number of heads than its site.
        """
        sites_by_name = {site.name: site for site in self.sites}
        for name, mask in masks.items():
            if name not in sites_by_name:
                message = f"there is a mask for {name}, which is not a site of the plan; use masks of this model"
                raise PlanError(message, code=GraphErrorCode.SITE_MISSING, site=name)
            if len(mask.kept) != sites_by_name[name].heads:
                raise PlanError(
                    f"{name}: the mask has {len(mask.kept)} heads, the site {sites_by_name[name].heads}; use masks of"
                    " this model",
                    code=GraphErrorCode.SITE_MISMATCH,
                    site=name,
                    heads=len(mask.kept),
                )
        sites = tuple(
            dataclasses.replace(site, mask=site.name, block=masks[site.name].block, memory=masks[site.name].memory)
            if site.name in masks
            else dataclasses.replace(site, mask=None, block=1, memory=0)
            for site in self.sites
        )
        plan = self.replace_groups(sites)
        plan._masks = dict(masks)
        return plan

    def part(self, names: Collection[str]) -> Plan:
        """The plan of some groups, e.g. of those of one graph of a model.

        Args:
            names: names of groups; those that the plan lacks are ignored.
        """
        groups = tuple(group for group in self.groups if group.name in names)
        plan = self.model_copy(update={"groups": groups})
        plan._masks = {name: mask for name, mask in self._masks.items() if name in names}
        return plan

    def __getitem__(self, name: str) -> GroupPlan:
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, and its masks as `<name>.safetensors` beside it.

        The same plan always gives the same bytes. Each file replaces a former one atomically, the masks first.
        """
        path = Path(path)
        if self._masks:
            tensors = {name: mask.kept.astype(np.uint8) for name, mask in sorted(self._masks.items())}
            with atomic_replace(path.with_suffix(".safetensors")) as temporary:
                temporary.write_bytes(safetensors.numpy.save(tensors))
        text = _with_short_lists(json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True)) + "\n"
        write_text(path, text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read and validate a plan and its masks.

        Raises:
            PlanError: a file is missing, is not JSON, or violates the schema; the message names the field.
        """
        path = Path(path)
        text = _read_text(path)
        try:
            plan = cls.model_validate_json(text)
        except pydantic.ValidationError as error:
            fault = _located_in_file(error.errors()[0], text)
            raise PlanError(
                f"{path}: {_describe_fault(fault)}; correct the plan or learn it again",
                code=GraphErrorCode.INVALID_PLAN,
                path=path,
                field=_field_of(fault),
                value=fault["input"],
            ) from error
        if not plan._masked_sites:
            return plan
        return plan.masked(_load_masks(path.with_suffix(".safetensors"), plan.sites))


def _read_text(path: Path) -> str:
    """The text of a plan.

    Raises:
        PlanError: the file is missing or unreadable.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        message = f"{path}: there is no such plan; give the path of a plan.json"
        raise PlanError(message, code=GraphErrorCode.FILE_MISSING, path=path) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        message = f"{path}: cannot be read as a plan ({reason}); give the path of a plan.json"
        raise PlanError(message, code=GraphErrorCode.FILE_UNREADABLE, path=path) from error


def _with_short_lists(text: str) -> str:
    """JSON with each list of numbers on one line; a feed-forward has thousands of neurons."""

    def join(numbers: re.Match[str]) -> str:
        return "[" + " ".join(numbers[1].split()) + "]"

    return re.sub(r"\[\n([\d\s.,eE+-]+)\]", join, text)  # strings have no line breaks


def _load_masks(path: Path, sites: Iterable[SitePlan]) -> dict[str, BlockMask]:
    """The masks of the sites that have one, by name of the site."""
    try:
        tensors = safetensors.numpy.load(path.read_bytes())
    except FileNotFoundError as error:
        message = f"{path}: there is no such file, which holds the plan's masks; put it into the plan's folder"
        raise PlanError(message, code=GraphErrorCode.FILE_MISSING, path=path) from error
    except (OSError, SafetensorError) as error:
        message = f"{path}: cannot be read as masks ({error}); learn the plan again"
        raise PlanError(message, code=GraphErrorCode.FILE_UNREADABLE, path=path) from error
    masks = {}
    for site in sites:
        if site.mask is None:
            continue
        kept = tensors.get(site.mask)
        if kept is None:
            message = f"{path}: the mask {site.mask} of site {site.name} is missing; learn the plan again"
            raise PlanError(message, code=GraphErrorCode.MASK_MISSING, path=path, site=site.name)
        try:
            masks[site.name] = BlockMask(kept.astype(np.bool_), site.block, site.memory)
        except ValueError as error:
            raise PlanError(
                f"{path}: {site.mask}: {error}", code=GraphErrorCode.INVALID_PLAN, path=path, site=site.name
            ) from error
    return masks


def _located_in_file(fault: ErrorDetails, text: str) -> ErrorDetails:
    """A fault with the location in the file: without the types of groups, and with the key of version 1."""
    location = fault["loc"]
    if location[:1] != ("groups",):
        return fault
    if len(location) > 2:
        location = (*location[:2], *location[3:])
    with contextlib.suppress(ValueError):
        if "sites" in json.loads(text):
            location = ("sites", *location[1:])
    return {**fault, "loc": location}


def _field_of(fault: ErrorDetails) -> str:
    """The field in which a plan violates the schema, e.g. `groups[0].kept`; empty for the whole plan."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")


def _describe_fault(fault: ErrorDetails) -> str:
    """What is wrong with a plan, for people who do not know pydantic."""
    field = _field_of(fault)
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    match fault["type"]:
        case "json_invalid":
            return f"is not JSON ({message.removeprefix('Invalid JSON: ')})"
        case "missing":
            return f"{field} is missing"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"{field} is not a key of a plan"
        case "value_error":
            return message
        case "literal_error" if field == "version":
            return f"version {fault['input']!r:.40} cannot be read, only versions 1 and 2"
    return f"{field or 'the plan'} is {fault['input']!r:.40} and {message}"
