"""The weights that a plan belongs to: their fingerprints, their file, and the initializers that hold them.

Fingerprints identify the weights in a graph of any exporter.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx_ir as ir
import pydantic.dataclasses
from pydantic import ConfigDict, Field
from safetensors import SafetensorError, safe_open

from graph_passes.errors import GraphErrorCode, PlanError

WEIGHTS = "model.safetensors"
"""Name of the file of weights in the output folder of a run."""
_LARGEST, _SMALLEST = 1e4, 2.0**-20
"""Magnitudes between which ONNX Runtime's converter to float16 only rounds; it may clip others to a bound."""
_DIGITS = 32

_Fingerprint = Annotated[str, Field(pattern=r"^(\d+(x\d+)*)?:[0-9a-f]{32}$")]


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class WeightRecord:
    """The fingerprints of one parameter of a model.

    Attributes:
        original: of its values in the model folder of the run that wrote the plan.
        fitted: of the values that the plan belongs to; equal to `original` where the run did not change them.
    """

    original: _Fingerprint
    fitted: _Fingerprint

    @property
    def is_changed(self) -> bool:
        """Whether the run changed the parameter."""
        return self.original != self.fitted


def fingerprint(tensor: np.ndarray) -> str:
    """The shape of a floating-point tensor and a hash of its values, e.g. `384x1536:` and 32 hexadecimal digits.

    Values are rounded to float16 first, so that float32 and float16 copies of a weight have one fingerprint. A matrix
    and its transpose have different ones.
    """
    rounded = np.clip(tensor.astype(np.float32, copy=False), -_LARGEST, _LARGEST).astype(np.float16)
    rounded = np.where(np.abs(rounded) < _SMALLEST, np.float16(0), rounded)
    digest = hashlib.sha256(np.ascontiguousarray(rounded).data).hexdigest()
    return f"{'x'.join(map(str, tensor.shape))}:{digest[:_DIGITS]}"


def shape_of(values: str) -> tuple[int, ...]:
    """The shape of the tensor that has this fingerprint."""
    sizes = values.partition(":")[0]
    return tuple(int(size) for size in sizes.split("x")) if sizes else ()


class WeightFile(Mapping[str, np.ndarray]):
    """The parameters in a safetensors file, by name. The file is opened when a name or a parameter is read.

    Args:
        path: the file, e.g. `out/model.safetensors`.

    Raises (from any access):
        PlanError: the file is missing, damaged or truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self._open().keys())

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        array: np.ndarray = self._open().get_tensor(name)
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)

    def _open(self) -> Any:
        try:
            return safe_open(self.path, framework="numpy")
        except FileNotFoundError as error:
            what = "it has the weights of the plan; put it into the plan's folder"
            message = f"{self.path}: there is no such file; {what}"
            raise PlanError(message, code=GraphErrorCode.FILE_MISSING, path=self.path) from error
        except (OSError, SafetensorError) as error:
            message = f"{self.path}: is damaged or truncated ({error}); copy it again"
            raise PlanError(message, code=GraphErrorCode.FILE_UNREADABLE, path=self.path) from error


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """An initializer that holds a parameter.

    Attributes:
        value: the initializer.
        transposed: whether it holds the transpose of the parameter.
    """

    value: ir.Value
    transposed: bool


@dataclasses.dataclass(frozen=True)
class MatchedWeight:
    """The initializers that hold one parameter, at least one in all.

    Attributes:
        original: initializers with the original values of a parameter that the plan's run changed.
        fitted: initializers with the values that the plan belongs to.
    """

    original: tuple[StoredWeight, ...]
    fitted: tuple[StoredWeight, ...]

    @property
    def initializers(self) -> frozenset[ir.Value]:
        """All of them."""
        return frozenset(stored.value for stored in (*self.original, *self.fitted))


_Stored = Mapping[str, Sequence[StoredWeight]]
"""Fingerprint -> initializers of these values."""


def match_weights(graph: ir.Graph, records: Mapping[str, WeightRecord]) -> dict[str, MatchedWeight]:
    """Pair parameters with the initializers that hold them, in float32 or float16, transposed or not.

    Cases:
        1. An initializer has the original or the fitted values of a parameter: it holds the parameter.
        2. Parameters have the same original values and other fitted ones: the names of the initializers decide.

    Args:
        records: name of a parameter -> its fingerprints. Parameters whose original values are those of a changed one
            must be among them.

    Raises:
        PlanError: the graph has neither the original nor the fitted values of a parameter, or names do not decide.
    """
    names: dict[WeightRecord, list[str]] = {}
    for name, record in records.items():
        names.setdefault(record, []).append(name)
    stored = _by_fingerprint(graph, records.values())
    matches = {}
    for record in names:
        original = tuple(stored.get(record.original, ())) if record.is_changed else ()
        rivals = {rival: names[rival] for rival in names if rival.original == record.original}
        if original and len(rivals) > 1:
            original = _decided_by_names(rivals, stored)[record]
        matches[record] = MatchedWeight(original, tuple(stored.get(record.fitted, ())))
        if not matches[record].initializers:
            held = "neither the original nor the refitted values" if record.is_changed else "not those"
            raise PlanError(
                f"{names[record][0]}: its values in this graph are {held} of the plan's model; use the whole graph of"
                " that model, or learn a plan on the model of this graph",
                code=GraphErrorCode.MODEL_MISMATCH,
                parameter=names[record][0],
            )
    return {name: matches[record] for name, record in records.items()}


def _by_fingerprint(graph: ir.Graph, records: Iterable[WeightRecord]) -> _Stored:
    """The initializers of the shapes that the records have; others are not read."""
    shapes = {shape_of(values) for record in records for values in (record.original, record.fitted)}
    stored: dict[str, list[StoredWeight]] = {}
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point():
            continue
        shape = tuple(tensor.shape.numpy())
        known: dict[str, StoredWeight] = {}
        if len(shape) == 2 and shape[::-1] in shapes:
            known[fingerprint(tensor.numpy().T)] = StoredWeight(value, transposed=True)
        if shape in shapes:
            known[fingerprint(tensor.numpy())] = StoredWeight(value, transposed=False)
        for values, weight in known.items():
            stored.setdefault(values, []).append(weight)
    return stored


def _decided_by_names(
    rivals: Mapping[WeightRecord, Sequence[str]], stored: _Stored
) -> dict[WeightRecord, tuple[StoredWeight, ...]]:
    """Case 2: the initializers of each of several records whose original values are the same."""
    named = {
        record: tuple(
            weight for weight in stored[record.original] if any(_is_named(weight.value, name) for name in names)
        )
        for record, names in rivals.items()
    }
    # A parameter whose fitted values are in the graph need not be there with the original ones.
    is_fitted = {record: record.is_changed and record.fitted in stored for record in rivals}
    needed = any(record.is_changed and (named[record] or not is_fitted[record]) for record in rivals)
    unknown = [names[0] for record, names in rivals.items() if not named[record] and not is_fitted[record]]
    if needed and unknown:
        parameters = [name for names in rivals.values() for name in names]
        initializers = [weight.value.name for record in rivals for weight in stored[record.original]]
        raise PlanError(
            f"{unknown[0]}: {len(parameters)} parameters of the model have the same values and are"
            f" {', '.join(sorted(set(map(str, initializers))))} in this graph, and the plan gives them different ones;"
            " export the graph with the names of the parameters",
            code=GraphErrorCode.SITE_AMBIGUOUS,
            site=unknown[0],
            parameters=parameters,
            initializers=initializers,
        )
    return named


def _is_named(value: ir.Value, name: str) -> bool:
    """Whether an initializer has the name of a parameter, up to a prefix that one of the two has."""
    return f".{value.name}".endswith(f".{name}") or f".{name}".endswith(f".{value.name}")
