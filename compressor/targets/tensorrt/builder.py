"""Build a graph into a serialized TensorRT engine, and deserialize engines, with Polygraphy."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

from compressor.errors import ErrorCode, InputError
from compressor.targets.base import Precision
from compressor.targets.cuda import CudaDriver
from compressor.targets.options import BuildOptions
from compressor.targets.tensorrt import bindings
from compressor.targets.tensorrt.bindings import Features
from compressor.targets.tensorrt.graph import element_types
from compressor.targets.tensorrt.log import TensorRtLog, capture_log
from compressor.targets.tensorrt.metadata import Shape, TimingsUse
from compressor.targets.tensorrt.timing_cache import TimingCache

Profiles = Mapping[str, tuple[Shape, Shape, Shape]]
"""Input -> smallest, usual and largest shape."""

_RETRY_SHARE = 8
"""A build that runs out of memory is repeated with the device's free memory divided by this as its workspace."""
_MIN_WORKSPACE = 8 << 20
"""Minimum workspace of a repeated build, in bytes."""
_log = logging.getLogger(__name__)


class _OutOfMemoryError(InputError):
    """The build needs more memory than the device has."""


class _NoImplementationError(InputError):
    """No kernel computes a layer in the required type."""


class _NoKernelFitsError(_OutOfMemoryError, _NoImplementationError):
    """No kernel computes a layer in the required type; some kernels were skipped because they need too much memory."""


class LayerTypes(StrEnum):
    """How the types that layers compute in were determined."""

    GRAPH = "the graph's"
    """The network is strongly typed."""
    REQUIRED = "required of every layer"
    PREFERRED = "preferred in every layer"
    """A layer has no kernel in its type, and computes in another one."""


@dataclass(frozen=True)
class SerializedEngine:
    """An engine as bytes.

    Attributes:
        data: the bytes.
        workspace: bytes of device memory that the build could use; None: all free memory.
        timings: how the timing cache was used.
        types: how the types of layers were determined.
    """

    data: bytes
    workspace: int | None
    timings: TimingsUse
    types: LayerTypes


@dataclass(frozen=True)
class EngineBuilder:
    """Builds engines with one version of TensorRT on one GPU.

    Attributes:
        trt: TensorRT's module.
        supported: its features.
        driver: the driver of the GPU.
        options: sizes and settings of the build.
        cache: the cache of kernel timings.
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
            profiles: shapes of the inputs.

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
            raise InputError(
                f"the GPU's memory is too small to build the engine, even with {workspace >> 20} MiB of workspace (it"
                f" has {self.driver.device.memory >> 20} MiB); free some, or build for smaller sizes (--batch, --seq)",
                code=ErrorCode.OUT_OF_MEMORY,
                workspace=workspace,
            ) from error

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
        return SerializedEngine(data, workspace, timings, types)

    def _config_options(self, workspace: int | None) -> dict[str, Any]:
        """Arguments of Polygraphy's `CreateConfig`."""
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
        if log.out_of_memory:
            kind = _OutOfMemoryError
        elif log.no_implementation:
            kind = _NoKernelFitsError if log.memory_warning else _NoImplementationError
        remedy = "a larger --workspace, " if log.insufficient_workspace else ""
        return kind(
            f"TensorRT {self.supported.version} cannot build the graph ({log.summary(error)}); try {remedy}--opset 18"
            " or --target ort",
            code=ErrorCode.RUNTIME_FAILED,
            runtime="tensorrt",
        )


def deserialize(driver: CudaDriver, path: Path) -> Any:
    """TensorRT's engine object from a file that is known to fit this machine.

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
            raise InputError(
                f"{path}: TensorRT cannot load it ({log.summary(error)}); build it again",
                code=ErrorCode.RUNTIME_FAILED,
                path=path,
                runtime="tensorrt",
            ) from error


def _raise_unless_null(error: Exception) -> None:
    """Raise a TypeError again, unless it means that TensorRT returned no builder or runtime."""
    if isinstance(error, TypeError) and "nullptr" not in str(error):
        raise error
