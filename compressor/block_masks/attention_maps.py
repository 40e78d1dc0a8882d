"""Average attention maps of a model's sites, in memory and on disk: masks of any density can be derived from them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from safetensors import SafetensorError

from compressor.errors import ErrorCode, InputError
from compressor.units import Site
from graph_passes import Kind
from graph_passes.files import atomic_replace


@dataclass(frozen=True)
class AttentionMaps:
    """Attention maps, averaged over rows.

    Attributes:
        maps: attention map of each site, float32 `[head, query, key]`, averaged over the rows that have both positions.
        counts: number of these rows for each site, float32 `[query, key]`.
        kinds: kind of each site.
        memory: number of key positions before position 0; column 0 is position `-memory`.
        model: fingerprint of the weights that computed the maps.
        data: hash of the rows.
        hidden: bool `[query, key]` of each site: pairs that the model's own mask (causality, a window) hides in every
            row that has both positions; sites without an entry hide none.
    """

    maps: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray]
    kinds: Mapping[str, Kind]
    memory: int
    model: str | None
    data: str | None
    hidden: Mapping[str, np.ndarray] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, from which masks of any density can be derived later."""
        path = Path(path)
        tensors = {f"{site}.map": array for site, array in self.maps.items()}
        tensors |= {f"{site}.count": array for site, array in self.counts.items()}
        tensors |= {f"{site}.hidden": array for site, array in self.hidden.items()}
        metadata = {"kinds": json.dumps(dict(self.kinds)), "memory": str(self.memory)}
        metadata |= {name: value for name in ("model", "data") if (value := getattr(self, name))}
        with atomic_replace(path) as partial:
            safetensors.numpy.save_file(tensors, partial, metadata=metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AttentionMaps:
        """Read a file that `save` wrote.

        Raises:
            InputError: the file is missing, or is not a file of attention maps.
        """
        try:
            with safetensors.safe_open(path, "numpy") as file:
                metadata = file.metadata() or {}
                kinds = dict(json.loads(metadata["kinds"]).items())
                maps = {site: file.get_tensor(f"{site}.map") for site in kinds}
                counts = {site: file.get_tensor(f"{site}.count") for site in kinds}
                names = {site: f"{site}.hidden" for site in kinds}
                stored = set(file.keys())  # nothing is hidden from a site without such a tensor
                hidden = {site: file.get_tensor(name) for site, name in names.items() if name in stored}
                origin = metadata.get("model"), metadata.get("data")
                return cls(maps, counts, kinds, int(metadata["memory"]), *origin, hidden)
        except FileNotFoundError as error:
            raise InputError(
                f"{path}: no such file of attention maps; use the maps.safetensors of an earlier run",
                code=ErrorCode.FILE_MISSING,
                path=Path(path),
            ) from error
        except (OSError, SafetensorError, KeyError, ValueError, AttributeError) as error:
            raise InputError(
                f"{path}: not a file of attention maps ({error}); use the maps.safetensors of a run",
                code=ErrorCode.FILE_UNREADABLE,
                path=Path(path),
            ) from error

    @property
    def length(self) -> int:
        """Number of positions that the maps cover, without the memory."""
        return len(next(iter(self.counts.values())))

    def cropped(self, length: int) -> AttentionMaps:
        """The maps of the first `length` positions, and of the memory before them."""
        keys = length + self.memory
        maps = {site: array[:, :length, :keys] for site, array in self.maps.items()}
        counts = {site: array[:length, :keys] for site, array in self.counts.items()}
        hidden = {site: array[:length, :keys] for site, array in self.hidden.items()}
        return replace(self, maps=maps, counts=counts, hidden=hidden)

    def check(self, sites: Sequence[Site], memory: int) -> None:
        """Check that the maps are of the sites of a model, whose weights may differ, e.g. after further training.

        Args:
            sites: the model's sites.
            memory: number of the model's key positions before position 0.

        Raises:
            InputError: sites, kinds, numbers of heads, shapes or the memory differ.
        """
        if self.memory != memory:
            raise _mismatch(
                f"the maps have a memory of {self.memory} positions, the model one of {memory}", "memory", self.memory
            )
        names = {site.name for site in sites}
        foreign = next((name for name in self.maps if name not in names), None)
        if foreign is not None:
            raise _mismatch(f"the model has no site {foreign}", "site", foreign)
        for site in sites:
            array = self.maps.get(site.name)
            if array is None:
                raise _mismatch(f"there is no map of {site.name}", "site", site.name)
            if self.kinds[site.name] != site.kind:
                text = f"the map of {site.name} is {self.kinds[site.name]}, the site {site.kind}"
                raise _mismatch(text, "kind", self.kinds[site.name], site=site.name)
            if len(array) != site.heads:
                text = f"the map of {site.name} has {len(array)} heads, the site {site.heads}"
                raise _mismatch(text, "heads", len(array), site=site.name)
            shape = (self.length, self.length + memory)
            parts = {"map": array[0], "count": self.counts[site.name], "hidden": self.hidden.get(site.name)}
            for part, pairs in ((part, pairs.shape) for part, pairs in parts.items() if pairs is not None):
                if pairs != shape:
                    text = f"{site.name}: the {part} covers {list(pairs)} positions, other maps {list(shape)}"
                    raise _mismatch(text, part, pairs, site=site.name)


def _mismatch(text: str, field: str, value: object, **details: Any) -> InputError:
    """The error for maps that do not belong to the model; `field` and `value` are details of the difference."""
    return InputError(
        f"attention maps: {text}; use maps of this model",
        code=ErrorCode.FILE_MISMATCH,
        field=field,
        value=value,
        **details,
    )
