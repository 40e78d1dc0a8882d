"""TensorRT's timing cache of kernels, with which builds are faster and equal inputs give an equal engine.

A file beside the cache holds its digest, and the version of TensorRT and the GPU that were timed. A cache that does not
match is moved away, and the build reports it.
"""

from __future__ import annotations

import errno
import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import ErrorCode, InputError
from compressor.targets.cuda import Device
from compressor.targets.graph_facts import digest
from compressor.targets.tensorrt.metadata import TimingsState, TimingsUse
from compressor.targets.user_cache import user_cache
from compressor.workdir import write_json
from graph_passes.files import atomic_replace

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TimingCache:
    """A file of kernel timings.

    Attributes:
        use: state of the file, as far as it is known before TensorRT reads it.
        machine: TensorRT's version and the GPU of new times.
    """

    use: TimingsUse
    machine: str

    @property
    def path(self) -> Path:
        """The file."""
        return self.use.path

    def apply(self, config: Any) -> TimingsUse:
        """Give the stored times to a build.

        Args:
            config: TensorRT's `IBuilderConfig`, with an empty cache.

        Returns:
            How the cache is used, with the state `REFUSED` where TensorRT does not accept it.
        """
        if self.use.state is not TimingsState.REUSED:
            return self.use
        times = config.create_timing_cache(self.path.read_bytes())
        if times is not None and config.set_timing_cache(times, False):
            return self.use
        config.set_timing_cache(config.create_timing_cache(b""), False)
        _log.debug("TensorRT does not accept the timing cache %s", self.path)
        return self.use.model_copy(update={"state": TimingsState.REFUSED})

    def save(self, config: Any, use: TimingsUse) -> TimingsUse:
        """Write the times of a finished build.

        Args:
            config: TensorRT's `IBuilderConfig` after the build.
            use: how the build used the cache.

        Returns:
            `use`, with an error where the file could not be written.
        """
        try:
            with atomic_replace(self.path) as file:
                file.write_bytes(config.get_timing_cache().serialize())
            write_json(seal_path(self.path), {"machine": self.machine, "digest": digest(self.path)})
        except OSError as error:
            return use.model_copy(update={"save_error": str(error.strerror)})
        return use


def open_cache(path: Path | None, version: str, device: Device) -> TimingCache:
    """The timing cache for a version of TensorRT and a GPU; a file that cannot be used is moved away.

    Args:
        path: its file; None: a file for the version and GPU in the user's cache folder.
        version: version of TensorRT.
        device: the GPU.

    Raises:
        InputError: the file cannot be written.
    """
    machine = f"TensorRT {version} on {device}"
    if path is None:
        name = "".join(letter if letter.isalnum() else "-" for letter in f"{version}-{device.name}")
        path = user_cache() / f"tensorrt-{name}.cache"
    _require_writable(path)
    if not path.is_file():
        return TimingCache(TimingsUse(state=TimingsState.NEW, path=path), machine)
    use = _inspect(path, machine)
    if use.state is not TimingsState.REUSED:
        _log.debug("timing cache %s is not used: %s", path, use.state)
        path.replace(path.with_name(f"{path.name}.unusable"))
    return TimingCache(use, machine)


def seal_path(path: Path) -> Path:
    """The file beside a timing cache that holds its digest and its machine."""
    return path.with_name(f"{path.name}.json")


def _require_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, f"{path.name} is a folder")
    except OSError as error:
        raise InputError(
            f"{path}: cannot write TensorRT's timing cache ({error.strerror}); name another file (--timing-cache)",
            code=ErrorCode.FILE_UNWRITABLE,
            field="timing_cache",
            path=path,
        ) from error


def _inspect(path: Path, machine: str) -> TimingsUse:
    """Whether the times in a file can be used on a machine."""
    if not path.stat().st_size:
        return TimingsUse(state=TimingsState.EMPTY, path=path)
    try:
        seal = json.loads(seal_path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:  # written by another tool; TensorRT itself checks it later
        return TimingsUse(state=TimingsState.REUSED, path=path)
    except (OSError, ValueError):
        seal = None
    if not isinstance(seal, dict) or seal.get("digest") != digest(path):
        return TimingsUse(state=TimingsState.DAMAGED, path=path)
    if seal.get("machine") != machine:
        return TimingsUse(state=TimingsState.OTHER_MACHINE, path=path, machine=str(seal.get("machine")))
    return TimingsUse(state=TimingsState.REUSED, path=path)
