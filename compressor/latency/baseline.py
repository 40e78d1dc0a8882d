"""What was measured of a model, in a file: a baseline for checks that cannot drive it at the same time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic

from compressor.environment import SAME, machine
from compressor.errors import InputError
from compressor.latency import artifacts
from compressor.targets.relative_error import as_bytes

_FORMAT = "compressor latency baseline 1"


def _array(entry: Any) -> np.ndarray:
    """What `_packed` took, or as it is."""
    if isinstance(entry, np.ndarray):
        return entry
    try:
        array = np.array(entry["values"], entry["dtype"])
        if array.dtype.kind not in "biufO":
            raise ValueError(f"no output is {array.dtype}")
        return _bytes(array) if array.dtype == np.object_ else array
    except (TypeError, KeyError, ValueError, OverflowError, AttributeError) as error:
        raise ValueError(f"no array: {error}") from error


def _packed(array: np.ndarray) -> dict[str, Any]:
    values = _text(as_bytes(array)) if array.dtype == np.object_ else array
    return {"dtype": str(array.dtype), "values": values.tolist()}


# A server gives texts as bytes in whatever encoding; JSON takes any byte as the character of its number.
_text = np.vectorize(lambda content: content.decode("latin-1"), otypes=[np.object_])
_bytes = np.vectorize(lambda text: text.encode("latin-1"), otypes=[np.object_])


Array = Annotated[np.ndarray, pydantic.PlainValidator(_array), pydantic.PlainSerializer(_packed)]
"""An array as JSON can hold it."""


class Baseline(pydantic.BaseModel):
    """What was measured of a model.

    Attributes:
        model, host, inputs: whose times, where, on what.
        batch, seq: size of its batches.
        times: milliseconds of every call, by block.
        answers: the outputs of every batch.
        machine: that it was measured on.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    format: str = _FORMAT
    model: str
    host: str
    inputs: str
    batch: int
    seq: int
    times: tuple[tuple[float, ...], ...]
    answers: tuple[dict[str, Array], ...]
    machine: dict[str, str]

    @classmethod
    def load(cls, path: Path) -> Baseline:
        """Raises:
        InputError: no such file, or not what `save` writes.
        """
        try:
            found = cls.model_validate_json(path.read_bytes())
        except (OSError, pydantic.ValidationError) as error:
            raise InputError(f"{path}: no baseline; write one by compress check ... --save-baseline {path}") from error
        if not found.times or len({len(block) for block in found.times} | {0}) != 2:
            raise InputError(f"{path}: a baseline without times, or with blocks of different lengths; measure it again")
        if found.format != _FORMAT:
            raise InputError(f"{path}: {found.format!r}, this version reads {_FORMAT!r}; measure it again")
        return found

    def save(self, path: Path) -> None:
        artifacts.write(path, self.model_dump_json())

    def elsewhere(self, host: str) -> str:
        """What is another machine's or server's than `host`, in words; empty where all is the same."""
        here = {**machine(), "host": host}
        then = {**self.machine, "host": self.host}
        return ", ".join(
            f"{name} {then.get(name)} there, {here.get(name)} here"
            for name in (*SAME, "host")
            if then.get(name) != here.get(name)
        )
