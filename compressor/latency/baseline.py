"""A saved baseline: times and outputs of a model, for checks that cannot call it at the same time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic

from compressor.environment import COMPARABLE_FIELDS, machine
from compressor.errors import ErrorCode, InputError
from compressor.results import size_label
from compressor.targets.base import Feeds
from compressor.targets.relative_error import as_bytes
from graph_passes.files import write_text

_FORMAT = "compressor latency baseline 1"


def _unpack(entry: Any) -> np.ndarray:
    if isinstance(entry, np.ndarray):
        return entry
    try:
        array = np.array(entry["values"], entry["dtype"])
        if array.dtype.kind not in "biufO":
            raise ValueError(f"an output cannot be of type {array.dtype}")
        return _encode_latin1(array) if array.dtype == np.object_ else array
    except (TypeError, KeyError, ValueError, OverflowError, AttributeError) as error:
        raise ValueError(f"not an array: {error}") from error


def _pack(array: np.ndarray) -> dict[str, Any]:
    values = _decode_latin1(as_bytes(array)) if array.dtype == np.object_ else array
    return {"dtype": str(array.dtype), "values": values.tolist()}


# A server sends texts as bytes in any encoding; Latin-1 maps every byte to a character of JSON.
_decode_latin1 = np.vectorize(lambda content: content.decode("latin-1"), otypes=[np.object_])
_encode_latin1 = np.vectorize(lambda text: text.encode("latin-1"), otypes=[np.object_])


Array = Annotated[np.ndarray, pydantic.PlainValidator(_unpack), pydantic.PlainSerializer(_pack)]
"""An array that JSON can hold."""


class Baseline(pydantic.BaseModel):
    """Times and outputs of a model.

    Attributes:
        format: version of the file's format.
        model: name of the model.
        host: where the model ran.
        inputs: digest of the batches.
        batch, seq: rows per call and tokens per row.
        times: milliseconds of every call, by round.
        outputs: for every batch, output name -> array.
        machine: description of the machine.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    format: str = _FORMAT
    model: str
    host: str
    inputs: str
    batch: int
    seq: int
    times: tuple[tuple[float, ...], ...]
    outputs: tuple[dict[str, Array], ...]
    machine: dict[str, str]

    @classmethod
    def load(cls, path: Path) -> Baseline:
        """Read a file that `save` wrote.

        Raises:
            InputError: the file is missing, is not a baseline, or has no times.
        """
        try:
            baseline = cls.model_validate_json(path.read_bytes())
        except (OSError, pydantic.ValidationError) as error:
            code = ErrorCode.FILE_MISSING if isinstance(error, FileNotFoundError) else ErrorCode.FILE_UNREADABLE
            text = f"not a readable baseline; write one with compress check ... --save-baseline {path}"
            raise InputError.of_file(path, text, code) from error
        if baseline.format != _FORMAT:
            text = f"the format is {baseline.format!r}, this version reads {_FORMAT!r}; measure it again"
            raise InputError.of_file(path, text, ErrorCode.FILE_MISMATCH, value=baseline.format)
        if not baseline.times or len({len(calls) for calls in baseline.times} | {0}) != 2:
            text = "the baseline has no times, or rounds of different lengths; measure it again"
            raise InputError.of_file(path, text, ErrorCode.FILE_UNREADABLE)
        return baseline

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        write_text(path, self.model_dump_json())

    @property
    def rounds(self) -> list[np.ndarray]:
        """Milliseconds of every call `[call]`, by round."""
        return [np.array(calls) for calls in self.times]


def check_comparable(baseline: Baseline, path: Path, batches: Sequence[Feeds], host: str, *, force: bool) -> None:
    """Make sure that new times may be compared with those of a saved baseline.

    Raises:
        InputError: the baseline was measured on another machine or on other inputs, or lacks outputs of a batch.
    """
    before, now = {**baseline.machine, "host": baseline.host}, {**machine(), "host": host}
    differences = [name for name in (*COMPARABLE_FIELDS, "host") if before.get(name) != now.get(name)]
    if differences and not force:
        changes = ", ".join(f"{name} was {before.get(name)}, is {now.get(name)}" for name in differences)
        text = (
            f"the baseline was measured on another machine ({changes}); measure a baseline here (--save-baseline), or "
            f"add --force to compare nevertheless"
        )
        raise InputError.of_file(path, text, ErrorCode.FILE_MISMATCH, differences=tuple(differences))
    if baseline.inputs != digest(batches):
        text = (
            f"measured on other inputs ({size_label(baseline.batch, baseline.seq)}); use the same --inputs, --batch, "
            f"--seq and --seed, or measure the baseline again"
        )
        raise InputError.of_file(path, text, ErrorCode.FILE_MISMATCH, differences=("inputs",))
    if len(baseline.outputs) != len(batches):
        text = f"the baseline has outputs for {len(baseline.outputs)} of {len(batches)} batches; measure it again"
        raise InputError.of_file(
            path, text, ErrorCode.FILE_UNREADABLE, count=len(baseline.outputs), expected=len(batches)
        )


def digest(batches: Sequence[Feeds]) -> str:
    """Hash of the batches of a check."""
    sha256 = hashlib.sha256()
    for batch in batches:
        for name, array in sorted(batch.items()):
            sha256.update(f"{name} {array.dtype} {array.shape}".encode())
            sha256.update(repr(array.tolist()).encode() if array.dtype == np.object_ else array.tobytes())
    return f"sha256:{sha256.hexdigest()}"
