"""Average attention maps of a model's sites, on disk and in memory: masks of any density are cut from them later."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
from safetensors import SafetensorError

from compressor.errors import InputError
from compressor.units import Site
from graph_passes import Kind
from graph_passes.files import beside
from graph_passes.plan import current_kind


@dataclass(frozen=True)
class AttentionMaps:
    """What was watched.

    Attributes:
        maps: site -> float32 `[head, query, key]`: attention, averaged over the examples that have both positions.
        counts: site -> float32 `[query, key]`: how many examples those are.
        kinds: site -> its kind.
        memory: key positions before position 0: column 0 is position `-memory`.
        model: fingerprint of the weights that were watched.
        data: hash of the rows.
    """

    maps: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray]
    kinds: Mapping[str, Kind]
    memory: int
    model: str | None
    data: str | None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file: masks of any density are cut from it later without another pass."""
        path = Path(path)
        tensors = {f"{site}.map": found for site, found in self.maps.items()}
        tensors |= {f"{site}.count": found for site, found in self.counts.items()}
        told = {"kinds": json.dumps(dict(self.kinds)), "memory": str(self.memory)}
        told |= {name: value for name in ("model", "data") if (value := getattr(self, name))}
        with beside(path) as place:
            safetensors.numpy.save_file(tensors, place, metadata=told)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AttentionMaps:
        """Read what `save` wrote.

        Raises:
            InputError: there is no such file, or it holds something else.
        """
        try:
            with safetensors.safe_open(path, "numpy") as file:
                told = file.metadata() or {}
                kinds = {site: current_kind(kind) for site, kind in json.loads(told["kinds"]).items()}
                maps = {site: file.get_tensor(f"{site}.map") for site in kinds}
                counts = {site: file.get_tensor(f"{site}.count") for site in kinds}
                return cls(maps, counts, kinds, int(told["memory"]), told.get("model"), told.get("data"))
        except FileNotFoundError as error:
            raise InputError(f"{path}: there are no such maps; give the maps.safetensors of an earlier run") from error
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise InputError(
                f"{path}: holds no attention maps ({error}); give the maps.safetensors of a run"
            ) from error

    @property
    def length(self) -> int:
        """Positions that the maps reach over."""
        return len(next(iter(self.counts.values())))

    def cropped(self, length: int) -> AttentionMaps:
        """The maps of the first `length` positions, and of the memory before them."""
        keys = length + self.memory
        maps = {site: found[:, :length, :keys] for site, found in self.maps.items()}
        counts = {site: found[:length, :keys] for site, found in self.counts.items()}
        return replace(self, maps=maps, counts=counts)

    def check(self, sites: Sequence[Site], memory: int) -> None:
        """Refuse maps of another model's sites.

        Raises:
            InputError: they differ in names, kinds, shapes or memory. Weights may differ: those of the model that
                learned on another data set do.
        """
        if self.memory != memory:
            raise InputError(f"maps: of a memory of {self.memory} positions, the model has {memory}; watch its own")
        strange = next((name for name in self.maps if name not in {site.name for site in sites}), None)
        if strange is not None:
            raise InputError(f"maps: of {strange}, which the model has not; give maps of this model")
        for site in sites:
            found = self.maps.get(site.name)
            if found is None or self.kinds[site.name] != site.kind or len(found) != site.heads:
                has = "no map" if found is None else f"a {self.kinds[site.name]} map of {len(found)} heads"
                raise InputError(
                    f"maps: {has} of {site.name}, which has {site.heads} heads of kind {site.kind}; give maps of this"
                    " model"
                )
            reach = (self.length, self.length + memory)
            if found.shape[1:] != reach or self.counts[site.name].shape != reach:
                raise InputError(
                    f"maps: {site.name}: {list(found.shape[1:])} pairs counted {list(self.counts[site.name].shape)}"
                    f" times, other maps have {list(reach)}; give maps as a run wrote them"
                )
