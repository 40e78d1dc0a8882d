"""Build a graph into a serialized TensorRT engine, and deserialize engines, with Polygraphy.

TensorRT reports the cause of a failure in its log, not in its exceptions, so its messages are captured.

A cache of kernel timings makes builds faster, and equal inputs give equal engines. A file beside the cache holds its
digest, the version of TensorRT and the GPU that was timed. A cache that does not match is moved away, and the build
reports that.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

from compressor.errors import ErrorCode, InputError
from compressor.silence_libraries import one_line
from compressor.targets.base import BuildOptions, Precision
from compressor.targets.cuda import CudaDriver, Device
from compressor.targets.graph_facts import digest
from compressor.targets.machine import user_cache
from compressor.targets.tensorrt import bindings
from compressor.targets.tensorrt.bindings import Features
from compressor.targets.tensorrt.graph import element_types
from compressor.targets.tensorrt.metadata import Shape, TimingsState, TimingsUse
from compressor.workdir import write_json
from graph_passes.files import atomic_replace

Profiles = Mapping[str, tuple[Shape, Shape, Shape]]
"""Input -> smallest, usual and largest shape."""
_RETRY_SHARE = 8
"""A build that runs out of memory is repeated with the free memory divided by this as its workspace."""
_MIN_WORKSPACE = 8 << 20
"""Minimum workspace of a repeated build, in bytes."""
_log = logging.getLogger(__name__)
_MEMORY_RAN_OUT = re.compile(
    r"out ?of ?memory|insuf+icient (device )?memory|memory is insufficient|std::bad_alloc|MemoryAllocation",
    re.IGNORECASE,
)
_NO_IMPLEMENTATION = re.compile(r"could not find any implementation", re.IGNORECASE)
_INSUFFICIENT_WORKSPACE = "insufficient workspace"


class _OutOfMemoryError(InputError):
    """The build needs more memory than the device has."""


class _NoImplementationError(InputError):
    """No kernel computes a layer in the required type."""


class _NoKernelFitsError(_OutOfMemoryError, _NoImplementationError):
    """No kernel computes a layer in its type, and some kernels were skipped because they need too much memory."""


class LayerTypes(StrEnum):
    """How the types that layers compute in were determined."""

    GRAPH = "the graph's"
    """The network is strongly typed."""
    REQUIRED = "required of every layer"
    PREFERRED = "preferred in every layer"
    """A layer has no kernel in its type, and computes in a different type."""


@dataclass(frozen=True)
class SerializedEngine:
    """An engine as bytes.

    Attributes:
        data: the bytes.
        workspace: bytes of device memory that the build could use; None: all free memory.
        timings: how the timing cache was used.
        types: how the types of layers were determined.
        profiles: shapes of the inputs.
    """

    data: bytes
    workspace: int | None
    timings: TimingsUse
    types: LayerTypes
    profiles: Profiles


@dataclass(frozen=True)
class EngineBuilder:
    """Builds engines with one version of TensorRT on one GPU.

    Attributes:
        supported: the features of this version.
        precision: numeric precision of a graph that is not quantized.
        quantized: whether the graph has quantization nodes.
    """

    trt: ModuleType
    supported: Features
    driver: CudaDriver
    options: BuildOptions
    cache: TimingCache
    precision: Precision
    quantized: bool

    def build(self, graph: Path, profiles: Profiles) -> SerializedEngine:
        """Build an engine.

        1. Where the device's memory runs out, the build is repeated with a smaller workspace.
        2. Where 8.6 has no kernel for a layer in its type, it is repeated with types that are preferred, not required.

        Args:
            graph: the graph, written by `graph.prepare`.

        Raises:
            InputError: TensorRT cannot read the graph, or cannot build it; the message contains its log.
        """
        self.driver.enter()
        # The second build is outside an exception handler: the exception keeps all memory of the first build alive.
        with contextlib.suppress(_OutOfMemoryError):
            return self._build_typed(graph, profiles, self.options.workspace)
        free = min(self.driver.free_memory(), self.options.workspace or self.driver.device.memory)
        workspace = max(_MIN_WORKSPACE, free // _RETRY_SHARE)
        _log.debug("memory ran out; building again in %d MiB", workspace >> 20)
        try:
            return self._build_typed(graph, profiles, workspace)
        except _OutOfMemoryError as error:
            text = (
                f"the GPU's memory is too small to build the engine, even with {workspace >> 20} MiB of workspace (it"
                f" has {self.driver.device.memory >> 20} MiB); free some, or build for smaller sizes (--batch, --seq)"
            )
            raise InputError(text, code=ErrorCode.OUT_OF_MEMORY, workspace=workspace) from error

    @property
    def _is_typed(self) -> bool:
        """Whether the network itself determines the type of every layer."""
        return self.supported.strongly_typed or self.quantized

    def _build_typed(self, graph: Path, profiles: Profiles, workspace: int | None) -> SerializedEngine:
        config = self._config_options(workspace)
        types = LayerTypes.GRAPH if self.supported.strongly_typed else LayerTypes.REQUIRED
        try:
            data, timings = self._build(graph, profiles, config)
        except _NoImplementationError:
            if self._is_typed:
                raise
            _log.debug("no kernel for a layer in its type; building again with preferred types")
            data, timings = self._build(graph, profiles, {**config, **bindings.PREFER_TYPES})
            types = LayerTypes.PREFERRED
        return SerializedEngine(data, workspace, timings, types, profiles)

    def _config_options(self, workspace: int | None) -> dict[str, Any]:
        trt, options = self.trt, self.options
        config = bindings.config_options(trt, self.supported, self.precision, quantized=self.quantized)
        if workspace is not None:
            config["memory_pool_limits"] = {trt.MemoryPoolType.WORKSPACE: workspace}
        if options.hardware_compatible:
            config["hardware_compatibility_level"] = trt.HardwareCompatibilityLevel.AMPERE_PLUS
        if options.version_compatible:
            config["version_compatible"] = True
        return config

    def _build(self, graph: Path, profiles: Profiles, config_options: Mapping[str, Any]) -> tuple[bytes, TimingsUse]:
        """The serialized engine, and how the timing cache was used."""
        from polygraphy.backend.trt import (
            CreateConfig,
            EngineBytesFromNetwork,
            NetworkFromOnnxPath,
            PostprocessNetwork,
            Profile,
        )
        from polygraphy.exception import PolygraphyException

        loader: Any = NetworkFromOnnxPath(os.fspath(graph), strongly_typed=bindings.has_typing_flag(self.trt))
        if not self._is_typed:
            types = element_types(graph)
            loader = PostprocessNetwork(loader, lambda network: bindings.set_layer_types(self.trt, network, types))
        profile = Profile()
        for name, (smallest, usual, largest) in profiles.items():
            profile.add(name, min=smallest, opt=usual, max=largest)
        with capture_log() as log:
            try:
                builder, network, *parser = loader()
                config = CreateConfig(profiles=[profile], **config_options)(builder, network)
                timings = self.cache.apply(config)
                data = bytes(EngineBytesFromNetwork((builder, network, *parser), config)())
            except (PolygraphyException, TypeError) as error:
                _raise_unless_null(error)
                raise self._build_error(log, error) from error
            return data, self.cache.save(config, timings)

    def _build_error(self, log: TensorRtLog, error: Exception) -> InputError:
        """The error for a failed build, according to the log."""
        kind: type[InputError] = InputError
        errors = " ".join(log.errors)
        if _MEMORY_RAN_OUT.search(errors):
            kind = _OutOfMemoryError
        elif _NO_IMPLEMENTATION.search(errors):
            kind = _NoKernelFitsError if log.memory_warning else _NoImplementationError
        remedy = "a larger --workspace, " if _INSUFFICIENT_WORKSPACE in errors else ""
        return kind(
            f"TensorRT {self.supported.version} cannot build the graph ({log.summary(error)}); try {remedy}--opset 18"
            " or --target ort",
            code=ErrorCode.RUNTIME_FAILED,
            runtime="tensorrt",
        )


def deserialize(driver: CudaDriver, path: Path) -> Any:
    """TensorRT's engine object from a file whose metadata match this machine.

    Raises:
        InputError: TensorRT cannot load it.
    """
    from polygraphy.backend.trt import EngineFromBytes
    from polygraphy.exception import PolygraphyException

    driver.enter()
    with capture_log() as log:
        try:
            return EngineFromBytes(path.read_bytes())()
        except (PolygraphyException, TypeError) as error:
            _raise_unless_null(error)
            text = f"{path}: TensorRT cannot load it ({log.summary(error)}); build it again"
            raise InputError(text, code=ErrorCode.RUNTIME_FAILED, path=path, runtime="tensorrt") from error


def _raise_unless_null(error: Exception) -> None:
    """Raise a TypeError again, unless it means that TensorRT returned no builder or runtime."""
    if isinstance(error, TypeError) and "nullptr" not in str(error):
        raise error


class TensorRtLog:
    """Collects the last errors that TensorRT logs, in place of a Python logger.

    Attributes:
        errors: the last error messages.
        memory_warning: whether TensorRT has warned of too little memory, for which it skips kernels without an error.
    """

    def __init__(self) -> None:
        self.errors: collections.deque[str] = collections.deque(maxlen=40)
        self.memory_warning = False

    def log(self, level: int, msg: str) -> None:
        """Receive a message; the signature is that of `logging.Logger.log`."""
        if level >= logging.ERROR:
            self.errors.append(" ".join(msg.split()))
        else:
            self.memory_warning = self.memory_warning or _MEMORY_RAN_OUT.search(msg) is not None

    def clear(self) -> None:
        """Forget all messages."""
        self.errors.clear()
        self.memory_warning = False

    def summary(self, error: BaseException | None = None) -> str:
        """All errors on one line; the exception's message where nothing was logged."""
        return one_line("; ".join(dict.fromkeys(self.errors)) or error or "TensorRT reports no reason", 400)


def current_log() -> TensorRtLog:
    """The log, cleared. From the first call on Polygraphy and TensorRT print nothing in this process."""
    from polygraphy.logger import G_LOGGER

    log = _install_log()
    log.clear()
    G_LOGGER.once_logged.clear()  # so that warnings which are logged once are logged again
    return log


@functools.cache
def _install_log() -> TensorRtLog:
    from polygraphy.logger import G_LOGGER

    log = TensorRtLog()
    G_LOGGER.use_python_logging_system = True
    G_LOGGER.python_logger = log
    G_LOGGER.module_severity, G_LOGGER.letter, G_LOGGER.colors = G_LOGGER.WARNING, False, False
    return log


@contextlib.contextmanager
def capture_log() -> Iterator[TensorRtLog]:
    """The log of the calls of Polygraphy inside the context, which use names that TensorRT 10.12 has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield current_log()


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
        text = f"{path}: cannot write TensorRT's timing cache ({error.strerror}); name another file (--timing-cache)"
        raise InputError(text, code=ErrorCode.FILE_UNWRITABLE, field="timing_cache", path=path) from error


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
