"""TensorRT's timing cache: how fast each kernel was, so that the same inputs give the same engine, and sooner.

A digest lies beside the file. Where it does not fit, the cache is damaged or another machine's: it is moved away, and
that is said.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from compressor.errors import InputError
from compressor.targets.device import Device
from compressor.targets.trt_metadata import digest
from compressor.workdir import write_json


@dataclass(frozen=True)
class TimingCache:
    """A file of timings.

    Attributes:
        path: where the times are kept.
        readable: the same, if there are any to start from.
        told: what a reader must know of it, as the rest of a sentence.
        machine: TensorRT's version and the GPU that the times are of.
    """

    path: Path
    readable: str | None
    told: str
    machine: str

    def seal(self) -> None:
        """Note the digest of what was written."""
        if self.path.is_file():
            write_json(_seal_of(self.path), {"machine": self.machine, "digest": digest(self.path)})


def opened(path: Path | None, version: str, device: Device) -> TimingCache:
    """The cache at a path, or the user's own for a TensorRT and a GPU.

    Raises:
        InputError: its folder cannot be written.
    """
    machine = f"TensorRT {version} on {device}"
    if path is None:
        name = "".join(letter if letter.isalnum() else "-" for letter in f"{version}-{device.name}")
        path = _home() / "compressor" / f"tensorrt-{name}.cache"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{path.parent}: cannot keep TensorRT's timings there ({error.strerror}); name another file"
            " (--timing-cache)"
        ) from error
    if not path.is_file():
        return TimingCache(path, None, "", machine)
    why = _fault(path, machine)
    if why is None:
        return TimingCache(path, os.fspath(path), ", with the timings of earlier builds", machine)
    path.replace(path.with_name(f"{path.name}.unusable"))
    return TimingCache(path, None, f", with timings made anew: {path} {why}", machine)


def _fault(path: Path, machine: str) -> str | None:
    """Why a cache is not to be used; None where it is."""
    if not path.stat().st_size:
        return "was empty"
    try:
        sealed = json.loads(_seal_of(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None  # another tool's: TensorRT itself compares the machine
    except (OSError, ValueError):
        sealed = None
    if not isinstance(sealed, dict) or sealed.get("digest") != digest(path):
        return "was damaged"
    return None if sealed.get("machine") == machine else f"was of {sealed.get('machine')}"


def _seal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _home() -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    return Path(named) if named else Path.home() / ".cache"
