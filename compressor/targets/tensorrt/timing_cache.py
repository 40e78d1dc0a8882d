"""TensorRT's timing cache: how fast each kernel was, so that the same inputs give the same engine, and sooner.

A digest lies beside the file. Where it does not fit, the cache is damaged or another machine's: it is moved away, and
that is said.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import InputError
from compressor.targets.cuda import Device
from compressor.targets.tensorrt.metadata import digest
from compressor.workdir import write_json
from graph_passes.files import beside


@dataclass(frozen=True)
class TimingCache:
    """A file of timings.

    Attributes:
        path: where the times are kept.
        readable: there are any to start from, as far as can be told before TensorRT sees them.
        told: what a reader must know of it, as the rest of a sentence.
        machine: TensorRT's version and the GPU that the times are of.
    """

    path: Path
    readable: bool
    told: str
    machine: str

    def give(self, config: Any) -> str:
        """Let a build start from these times; what a reader must know of them, as the rest of a sentence.

        Args:
            config: TensorRT's `IBuilderConfig`, with an empty cache.
        """
        if not self.readable:
            return self.told
        times = config.create_timing_cache(self.path.read_bytes())
        if times is not None and config.set_timing_cache(times, False):
            return self.told
        config.set_timing_cache(config.create_timing_cache(b""), False)
        return f", with timings made anew: TensorRT does not take {self.path}"

    def keep(self, config: Any) -> str:
        """Write the times that a build has ended with; if that fails, why, as the rest of a sentence."""
        try:
            with beside(self.path) as place:
                place.write_bytes(config.get_timing_cache().serialize())
            write_json(_seal_of(self.path), {"machine": self.machine, "digest": digest(self.path)})
        except OSError as error:
            return f", its timings not kept in {self.path} ({error.strerror})"
        return ""


def opened(path: Path | None, version: str, device: Device) -> TimingCache:
    """The cache at a path, or the user's own for a TensorRT and a GPU.

    Raises:
        InputError: it cannot be written there.
    """
    machine = f"TensorRT {version} on {device}"
    if path is None:
        name = "".join(letter if letter.isalnum() else "-" for letter in f"{version}-{device.name}")
        path = _home() / "compressor" / f"tensorrt-{name}.cache"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, f"{path.name} is a folder")
    except OSError as error:
        raise InputError(
            f"{path.parent}: cannot keep TensorRT's timings there ({error.strerror}); name another file"
            " (--timing-cache)"
        ) from error
    if not path.is_file():
        return TimingCache(path, False, "", machine)
    why = _fault(path, machine)
    if why is None:
        return TimingCache(path, True, ", with the timings of earlier builds", machine)
    path.replace(path.with_name(f"{path.name}.unusable"))
    return TimingCache(path, False, f", with timings made anew: {path} {why}", machine)


def _fault(path: Path, machine: str) -> str | None:
    """Why a cache is not to be used; None where it is."""
    if not path.stat().st_size:
        return "was empty"
    try:
        sealed = json.loads(_seal_of(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None  # another tool's: TensorRT itself says whether it takes it
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
