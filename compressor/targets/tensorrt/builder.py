"""From a graph to a serialized engine, and to a loaded one, by Polygraphy; what TensorRT says is remembered."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from compressor.errors import InputError
from compressor.silence_libraries import one_line
from compressor.targets.base import BuildOptions, Precision
from compressor.targets.cuda import CudaDriver
from compressor.targets.tensorrt import bindings
from compressor.targets.tensorrt.bindings import Api
from compressor.targets.tensorrt.graph import element_types
from compressor.targets.tensorrt.metadata import Shape
from compressor.targets.tensorrt.timing_cache import TimingCache

Profiles = Mapping[str, tuple[Shape, Shape, Shape]]
"""Least, usual and largest shape by input."""

_OUT_OF_MEMORY = re.compile(
    r"out ?of ?memory|insuf+icient (device )?memory|memory is insufficient|std::bad_alloc|MemoryAllocation",
    re.IGNORECASE,
)
_NO_IMPLEMENTATION = re.compile(r"could not find any implementation", re.IGNORECASE)
_SMALLER = 8
"""By how much less of the device's free memory a build is tried again with."""
_LEAST = 8 << 20
"""Bytes that are worth trying."""


class _OutOfMemoryError(InputError):
    """Building took more memory than the device has."""


class _NoImplementationError(InputError):
    """No kernel computes a layer as it was asked to."""


class _NoneLeftError(_OutOfMemoryError, _NoImplementationError):
    """The same, and some were left out for want of memory."""


@dataclass(frozen=True)
class Serialized:
    """An engine as bytes.

    Attributes:
        plan: the engine.
        workspace: bytes that it was built in; None: all that was free.
        timings: what a reader must know of the timings of kernels, as the rest of a sentence.
        types: whose types layers compute in, in words.
    """

    plan: bytes
    workspace: int | None
    timings: str
    types: str


def serialized(
    trt: ModuleType,
    api: Api,
    of: CudaDriver,
    graph: Path,
    profiles: Profiles,
    tuning: BuildOptions,
    cache: TimingCache,
    *,
    precision: Precision,
    quantized: bool,
) -> Serialized:
    """Build an engine; where the device's memory runs out, once more with a smaller workspace; where 8.6 has no kernel
    for a layer in its own type, once more with types that are asked for and not required.

    Args:
        graph: as TensorRT reads it.
        precision: numbers of a graph that is not quantized.
        quantized: the graph says by `QuantizeLinear` what it computes in.

    Raises:
        InputError: TensorRT cannot read the graph, or cannot build it; the message holds what it says.
    """

    typed = api.strongly_typed or quantized

    def built(workspace: int | None) -> Serialized:
        options = bindings.config_options(trt, api, precision, quantized=quantized) | _asked(trt, tuning, workspace)
        types = "the graph's" if api.strongly_typed else "asked of every layer"
        try:
            plan, told = _built(trt, api, graph, profiles, cache, options, typed)
        except _NoImplementationError:
            if typed:
                raise
            plan, told = _built(trt, api, graph, profiles, cache, {**options, **bindings.PREFERRED}, typed)
            types = "asked of every layer, and not required"
        return Serialized(plan, workspace, told, types)

    of.enter()
    # Outside the handler: as long as the error is at hand, so is all the memory that the first try has taken.
    with contextlib.suppress(_OutOfMemoryError):
        return built(tuning.workspace)
    smaller = max(_LEAST, min(of.free_memory(), tuning.workspace or of.device.memory) // _SMALLER)
    try:
        return built(smaller)
    except _OutOfMemoryError as error:
        raise InputError(
            f"the GPU's memory is too small to build the engine, even with {smaller >> 20} MiB to work in (it has"
            f" {of.device.memory >> 20} MiB); free some, or build for smaller sizes (--batch, --seq)"
        ) from error


def deserialized(of: CudaDriver, path: Path) -> Any:
    """TensorRT's engine in a file, which is known to be one that runs here.

    Raises:
        InputError: TensorRT does not take it.
    """
    from polygraphy.backend.trt import EngineFromBytes
    from polygraphy.exception import PolygraphyException

    of.enter()
    with capture_log() as said:
        try:
            return EngineFromBytes(path.read_bytes())()
        except (PolygraphyException, TypeError) as error:
            _raise_unless_null(error)
            raise InputError(f"{path}: TensorRT cannot load it ({said.told(error)}); build it again") from error


def _raise_unless_null(error: Exception) -> None:
    """Raise a TypeError again, unless it means that TensorRT gave no builder or runtime."""
    if isinstance(error, TypeError) and "nullptr" not in str(error):
        raise error


class TensorRtLog:
    """The last errors that TensorRT has logged: its exceptions say nothing of the cause.

    Attributes:
        lines: errors.
        short: whether it has warned that memory was short: kernels that need more are left out with no error, until
            none is left.
    """

    def __init__(self) -> None:
        self.lines: collections.deque[str] = collections.deque(maxlen=40)
        self.short = False

    def log(self, level: int, msg: str) -> None:
        """Takes the place of a logger of Python's."""
        if level >= logging.ERROR:
            self.lines.append(" ".join(msg.split()))
        else:
            self.short = self.short or _OUT_OF_MEMORY.search(msg) is not None

    def told(self, error: BaseException | None = None) -> str:
        """All of it on one line."""
        return one_line("; ".join(dict.fromkeys(self.lines)) or error or "it does not say why", 400)


def listening() -> TensorRtLog:
    """The errors from now on. Nothing that Polygraphy and TensorRT say is printed, as long as this process lives."""
    from polygraphy.logger import G_LOGGER

    said = _routed()
    said.lines.clear()
    said.short = False
    G_LOGGER.once_logged.clear()  # a warning that was heard before is heard again
    return said


@functools.cache
def _routed() -> TensorRtLog:
    from polygraphy.logger import G_LOGGER

    said = TensorRtLog()
    G_LOGGER.use_python_logging_system = True
    G_LOGGER.python_logger = said
    G_LOGGER.module_severity, G_LOGGER.letter, G_LOGGER.colors = G_LOGGER.WARNING, False, False
    return said


@contextlib.contextmanager
def capture_log() -> Iterator[TensorRtLog]:
    """The same around calls of Polygraphy, which uses what TensorRT from 10.12 on warns will go."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield listening()


def _built(
    trt: ModuleType,
    api: Api,
    graph: Path,
    profiles: Profiles,
    cache: TimingCache,
    options: Mapping[str, Any],
    typed: bool,
) -> tuple[bytes, str]:
    """The engine and what is to be said of the timings: see `serialized`.

    Args:
        options: arguments of Polygraphy's `CreateConfig`.
        typed: the network says itself what every layer computes in.
    """
    from polygraphy.backend.trt import (
        CreateConfig,
        EngineBytesFromNetwork,
        NetworkFromOnnxPath,
        PostprocessNetwork,
        Profile,
    )
    from polygraphy.exception import PolygraphyException

    network: Any = NetworkFromOnnxPath(os.fspath(graph), strongly_typed=bindings.can_ask_types(trt))
    if not typed:
        types = element_types(graph)
        network = PostprocessNetwork(network, lambda network: bindings.keep_types(trt, network, types))
    profile = Profile()
    for name, (least, usual, most) in profiles.items():
        profile.add(name, min=least, opt=usual, max=most)
    with capture_log() as said:
        try:
            builder, made, *parser = network()
            config = CreateConfig(profiles=[profile], **options)(builder, made)
            told = cache.give(config)
            plan = bytes(EngineBytesFromNetwork((builder, made, *parser), config)())
        except (PolygraphyException, TypeError) as error:
            _raise_unless_null(error)
            why, lines = said.told(error), " ".join(said.lines)
            kind: type[InputError] = InputError
            if _OUT_OF_MEMORY.search(lines):
                kind = _OutOfMemoryError
            elif _NO_IMPLEMENTATION.search(lines):
                kind = _NoneLeftError if said.short else _NoImplementationError
            more = "a larger --workspace, " if "insufficient workspace" in lines else ""
            raise kind(
                f"TensorRT {api.version} cannot build the graph ({why}); try {more}--opset 18 or --target ort"
            ) from error
        return plan, told + cache.keep(config)


def _asked(trt: ModuleType, tuning: BuildOptions, workspace: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if workspace is not None:
        options["memory_pool_limits"] = {trt.MemoryPoolType.WORKSPACE: workspace}
    if tuning.hardware_compatible:
        options["hardware_compatibility_level"] = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if tuning.version_compatible:
        options["version_compatible"] = True
    return options
