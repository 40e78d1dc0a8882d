"""The plan: the one thing that passes from learning to the graph.

A plan names every attention site by its module path, the heads kept there under their original ids, and one scale a
kept head. It is JSON with a published schema (`Plan.model_json_schema()`), and every reader validates it whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pydantic
import safetensors.numpy
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails
from safetensors import SafetensorError

from graph_passes.block_sparse.masks import BlockMask
from graph_passes.errors import PlanError
from graph_passes.files import atomic_replace

Kind = Literal["bidirectional", "causal", "cross"]
"""Kind of an attention: self-attention without and with causality, and attention to another sequence."""

_FORMER_KINDS: Mapping[str, Kind] = {"encoder": "bidirectional", "decoder": "causal"}
"""What files written by version 0.1 call the kinds of self-attention."""


def current_kind(name: Any) -> Any:
    """The current name of a kind read from a file; any other value is returned as it is."""
    return _FORMER_KINDS.get(name, name) if isinstance(name, str) else name


_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=_STRICT)
class SitePlan:
    """What happens at one attention site.

    Attributes:
        name: module path of the attention module, e.g. `bert.encoder.layer.0.attention.self`.
        kind: `bidirectional`, `causal` (both self-attention) or `cross`.
        heads: query heads of the untouched model.
        kv_heads: key/value heads of the untouched model; divides `heads`.
        head_dim: width of one head's value vector.
        kept: original ids of the heads kept, ascending. Empty: the whole attention goes.
        scale: the gate of each kept head, in the order of `kept`. Left out: all ones.
        mask: name of a tensor in `plan.safetensors` beside the plan, or None: every pair of positions is computed.
        block: of the mask: positions along each side of a block.
        memory: of the mask: key positions before position 0.
    """

    name: Annotated[str, Field(min_length=1)]
    kind: Annotated[Kind, pydantic.BeforeValidator(current_kind)]
    heads: Annotated[int, Field(gt=0)]
    kv_heads: Annotated[int, Field(gt=0)]
    head_dim: Annotated[int, Field(gt=0)]
    kept: tuple[Annotated[int, Field(ge=0)], ...]
    scale: tuple[float, ...] = ()
    mask: str | None = None
    block: Annotated[int, Field(gt=0)] = 1
    memory: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.kv_heads} key/value heads do not divide {self.heads} heads")
        if list(self.kept) != sorted(set(self.kept)):
            raise ValueError(f"{self.name}: kept heads {list(self.kept)} must be ascending and without repeats")
        if self.kept and self.kept[-1] >= self.heads:
            raise ValueError(
                f"{self.name}: head {self.kept[-1]} is out of range, the site has heads 0 to {self.heads - 1}"
            )
        if not self.scale and self.kept:
            object.__setattr__(self, "scale", (1.0,) * len(self.kept))
        if len(self.scale) != len(self.kept):
            raise ValueError(
                f"{self.name}: {len(self.scale)} scales for {len(self.kept)} kept heads; give one a kept head"
            )

    @property
    def dropped(self) -> tuple[int, ...]:
        """Original ids of the heads that go, ascending."""
        return tuple(head for head in range(self.heads) if head not in self.kept)

    @property
    def gate(self) -> tuple[float, ...]:
        """One gate a head `[heads]`: the scale where kept, zero where dropped."""
        scale = dict(zip(self.kept, self.scale, strict=True))
        return tuple(scale.get(head, 0.0) for head in range(self.heads))


class Plan(BaseModel):
    """Every site of one model, and where the choice came from.

    Attributes:
        sites: one entry a site, in the order in which the model calls them.
        model: fingerprint of the model's weights and configuration (`sha256:...`), or None for any model.
        method: how the heads were chosen (`dsp`, `taylor`, ...), or None.
        options: the method's options.
        seed: the run's seed.
        data: hash of the training rows (`sha256:...`), or None.
        evidence: metrics before and after, e.g. `{"eval": {"dense": {"accuracy": 0.9}, "compressed": {...}}}`.
    """

    model_config = ConfigDict(frozen=True, **_STRICT)

    version: Literal[1] = 1
    sites: tuple[SitePlan, ...]
    model: str | None = None
    method: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    seed: int | None = None
    data: str | None = None
    evidence: dict[str, Any] = Field(default_factory=dict)
    _masks: dict[str, BlockMask] = PrivateAttr(default_factory=dict)

    @pydantic.model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [site.name for site in self.sites]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"site {twice[0]} is listed twice; give each site one entry")
        return self

    @property
    def heads(self) -> int:
        """Heads of the untouched model, over all sites."""
        return sum(site.heads for site in self.sites)

    @property
    def heads_kept(self) -> int:
        """Heads kept, over all sites."""
        return sum(len(site.kept) for site in self.sites)

    @property
    def masks(self) -> Mapping[str, BlockMask]:
        """The masks of the sites that have one, by the site's name."""
        return self._masks

    def masked(self, masks: Mapping[str, BlockMask]) -> Plan:
        """The plan with these masks, by the site's name, and no others.

        Raises:
            PlanError: a site that the plan lacks, or a mask for other heads than its site has.
        """
        named = {site.name: site for site in self.sites}
        for name, mask in masks.items():
            if name not in named:
                raise PlanError(f"a mask for {name}, which is no site of the plan; give masks of this model")
            if len(mask.kept) != named[name].heads:
                raise PlanError(
                    f"{name}: a mask for {len(mask.kept)} heads, the site has {named[name].heads}; give masks of this"
                    " model"
                )
        sites = tuple(
            dataclasses.replace(site, mask=site.name, block=masks[site.name].block, memory=masks[site.name].memory)
            if site.name in masks
            else dataclasses.replace(site, mask=None, block=1, memory=0)
            for site in self.sites
        )
        plan = self.model_copy(update={"sites": sites})
        plan._masks = dict(masks)
        return plan

    def __getitem__(self, name: str) -> SitePlan:
        for site in self.sites:
            if site.name == name:
                return site
        raise KeyError(name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, and its masks as `<name>.safetensors` beside it; the same plan always gives the same
        bytes. Written beside and renamed, the masks first."""
        path = Path(path)
        if self._masks:
            self._save_masks(path.with_suffix(".safetensors"))
        with atomic_replace(path) as place:
            place.write_text(
                json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n", encoding="utf-8"
            )

    def _save_masks(self, path: Path) -> None:
        tensors = {name: mask.kept.astype(np.uint8) for name, mask in sorted(self._masks.items())}
        with atomic_replace(path) as place:
            place.write_bytes(safetensors.numpy.save(tensors))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read and validate a plan and its masks.

        Raises:
            PlanError: a file is missing, is not JSON, or breaks the schema; one line says where.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise PlanError(f"{path}: there is no such plan; give the path of a plan.json") from error
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise PlanError(f"{path}: cannot be read as a plan ({why}); give the path of a plan.json") from error
        try:
            plan = cls.model_validate_json(text)
        except pydantic.ValidationError as error:
            raise PlanError(f"{path}: {_fault(error.errors()[0])}; mend the plan or learn it again") from error
        if not any(site.mask for site in plan.sites):
            return plan
        return plan.masked(_load_masks(Path(path).with_suffix(".safetensors"), plan.sites))


def _load_masks(path: Path, sites: Iterable[SitePlan]) -> dict[str, BlockMask]:
    try:
        tensors = safetensors.numpy.load(path.read_bytes())
    except FileNotFoundError as error:
        raise PlanError(
            f"{path}: there is no such file, and the plan's masks lie in it; put it beside the plan"
        ) from error
    except (OSError, SafetensorError) as error:
        raise PlanError(f"{path}: cannot be read as masks ({error}); learn the plan again") from error
    masks = {}
    for site in sites:
        if site.mask is not None:
            kept = tensors.get(site.mask)
            if kept is None:
                raise PlanError(f"{path}: the mask {site.mask} of {site.name} is missing; learn the plan again")
            try:
                masks[site.name] = BlockMask(kept.astype(np.bool_), site.block, site.memory)
            except ValueError as error:
                raise PlanError(f"{path}: {site.mask}: {error}") from error
    return masks


def _fault(error: ErrorDetails) -> str:
    """What is wrong with a plan, in the words of one who has never seen the code that reads it."""
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    said = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    match error["type"]:
        case "json_invalid":
            return f"is not JSON ({said.removeprefix('Invalid JSON: ')})"
        case "missing":
            return f"{where} is missing"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"{where} is no key of a plan"
        case "value_error":
            return said
        case "literal_error" if where == "version":
            return f"version {error['input']!r:.40} is not read, only version 1"
    return f"{where or 'the plan'} is {error['input']!r:.40} and {said}"
