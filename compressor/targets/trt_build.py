"""From a graph to a serialized engine, and to a loaded one, by Polygraphy; what TensorRT says is remembered."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from compressor.errors import InputError
from compressor.quiet import one_line
from compressor.targets import trt_api
from compressor.targets.base import Tuning
from compressor.targets.device import Driver
from compressor.targets.trt_api import Api
from compressor.targets.trt_cache import TimingCache
from compressor.targets.trt_metadata import Shape

Profiles = Mapping[str, tuple[Shape, Shape, Shape]]
"""Least, usual and largest shape by input."""

_OUT_OF_MEMORY = re.compile(
    r"out ?of ?memory|insufficient (device )?memory|std::bad_alloc|MemoryAllocation", re.IGNORECASE
)
_SMALLER = 8
"""By how much less of the device's free memory a build is tried again with."""


class _OutOfMemoryError(InputError):
    """Building took more memory than the device has."""


def serialized(
    trt: ModuleType,
    api: Api,
    of: Driver,
    graph: Path,
    profiles: Profiles,
    tuning: Tuning,
    cache: TimingCache,
    options: Mapping[str, Any],
) -> tuple[bytes, int | None]:
    """Build an engine; where the device's memory runs out, once more with a smaller workspace.

    Args:
        graph: as TensorRT reads it.
        options: arguments of Polygraphy's `CreateConfig` that depend on the version.

    Returns:
        The engine, and the workspace in bytes that it was built in; None: all that was free.

    Raises:
        InputError: TensorRT cannot read the graph, or cannot build it; the message holds what it says.
    """
    of.enter()
    try:
        return _built(trt, api, graph, profiles, tuning, tuning.workspace, cache, options), tuning.workspace
    except _OutOfMemoryError as first:
        smaller = min(of.free_memory(), tuning.workspace or of.device.memory) // _SMALLER
        try:
            return _built(trt, api, graph, profiles, tuning, smaller, cache, options), smaller
        except _OutOfMemoryError:
            raise InputError(
                f"the GPU's memory is too small to build the engine, even with {smaller >> 20} MiB to work in (it has"
                f" {of.device.memory >> 20} MiB); free some, or build for smaller sizes (--batch, --seq)"
            ) from first


def deserialized(path: Path) -> Any:
    """TensorRT's engine in a file, which is known to be one that runs here.

    Raises:
        InputError: TensorRT does not take it.
    """
    from polygraphy.backend.trt import EngineFromBytes
    from polygraphy.exception import PolygraphyException

    with heard() as said:
        try:
            return EngineFromBytes(path.read_bytes())()
        except PolygraphyException as error:
            raise InputError(f"{path}: TensorRT cannot load it ({said.told(error)}); build it again") from error


class Said:
    """The errors that TensorRT logs: its exceptions say nothing of the cause."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, level: int, msg: str) -> None:
        """Takes the place of a logger of Python's."""
        self.lines.append(" ".join(msg.split()))

    def told(self, error: BaseException | None = None) -> str:
        """All of it on one line."""
        return one_line("; ".join(dict.fromkeys(self.lines)) or error or "it does not say why", 400)


@contextlib.contextmanager
def heard() -> Iterator[Said]:
    """Polygraphy and TensorRT print nothing; their errors are remembered."""
    from polygraphy.logger import G_LOGGER

    said = Said()
    before = {name: getattr(G_LOGGER, name) for name in ("module_severity", "letter", "colors")}
    routed = G_LOGGER.use_python_logging_system
    G_LOGGER.use_python_logging_system = True
    G_LOGGER.python_logger = said
    G_LOGGER.module_severity, G_LOGGER.letter, G_LOGGER.colors = G_LOGGER.ERROR, False, False
    try:
        yield said
    finally:
        G_LOGGER.use_python_logging_system = routed
        for name, value in before.items():
            setattr(G_LOGGER, name, value)


def _built(
    trt: ModuleType,
    api: Api,
    graph: Path,
    profiles: Profiles,
    tuning: Tuning,
    workspace: int | None,
    cache: TimingCache,
    options: Mapping[str, Any],
) -> bytes:
    from polygraphy.backend.trt import (
        CreateConfig,
        EngineBytesFromNetwork,
        NetworkFromOnnxPath,
        PostprocessNetwork,
        Profile,
    )
    from polygraphy.exception import PolygraphyException

    network: Any = NetworkFromOnnxPath(os.fspath(graph), strongly_typed=api.strongly_typed)
    if not api.strongly_typed:
        network = PostprocessNetwork(network, lambda network: trt_api.keep_types(trt, network))
    profile = Profile()
    for name, (least, usual, most) in profiles.items():
        profile.add(name, min=least, opt=usual, max=most)
    asked = {**options, **_asked(trt, tuning, workspace)}
    with heard() as said:
        config = CreateConfig(profiles=[profile], load_timing_cache=cache.readable, **asked)
        try:
            plan = EngineBytesFromNetwork(network, config, save_timing_cache=os.fspath(cache.path))()
        except (PolygraphyException, TypeError) as error:  # TypeError: TensorRT gave no builder
            why = said.told(error)
            kind = _OutOfMemoryError if _OUT_OF_MEMORY.search(" ".join(said.lines)) else InputError
            raise kind(
                f"TensorRT {api.version} cannot build the graph ({why}); try --opset 18 or --target ort"
            ) from error
    cache.seal()
    return bytes(plan)


def _asked(trt: ModuleType, tuning: Tuning, workspace: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if workspace is not None:
        options["memory_pool_limits"] = {trt.MemoryPoolType.WORKSPACE: workspace}
    if tuning.hardware_compatible:
        options["hardware_compatibility_level"] = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if tuning.version_compatible:
        options["version_compatible"] = True
    return options
