"""Runtimes to build for, by name: one file a runtime."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol

from compressor.errors import UsageError
from compressor.targets.base import TOLERANCE, BuildOptions, Engine, Feeds, Precision, Provider, span


class Build(Protocol):
    """What every target offers: a graph in, a loaded engine out.

    Args of the call:
        onnx: the graph to build; it is not changed.
        out: where the file that the runtime loads goes.
        precision: numbers that it computes in.
        provider: where it runs; None: a GPU where there is one.
        threads: threads of one call; None: one a core.
        tuning: what only some runtimes make use of; None: its defaults.

    Raises:
        TargetMissingError: the runtime or the device is not there.
        InputError: the runtime cannot read the graph.
    """

    def __call__(
        self,
        onnx: Path,
        out: Path,
        *,
        precision: Precision = "fp32",
        provider: Provider | None = None,
        threads: int | None = None,
        tuning: BuildOptions | None = None,
    ) -> Engine: ...


# Resolved when asked for: a runtime that is not installed is no reason to fail before.
_HOMES = {"ort": "compressor.targets.onnxruntime.target", "trt": "compressor.targets.tensorrt.target"}
TARGETS = tuple(_HOMES)
ENGINE_FILES = {"ort": "engine.onnx", "trt": "engine.plan"}
"""Name of the file that each runtime loads."""


def target(name: str) -> Build:
    """The build function of a target.

    Raises:
        UsageError: there is no target of this name.
        TargetMissingError: its runtime is not on this machine.
    """
    if name not in _HOMES:
        raise UsageError(f"{name}: there is no such target; use one of {', '.join(TARGETS)}")
    build: Build = import_module(_HOMES[name]).build
    return build


def check(name: str, precision: Precision, provider: Provider | None, kernel: Path | None = None) -> None:
    """Make sure that a target can be built for here, before any work is done towards it.

    Raises:
        UsageError: there is no target of this name, or it cannot use this kernel.
        TargetMissingError: its runtime or device is not on this machine.
    """
    target(name)
    import_module(_HOMES[name]).check(provider, precision, kernel)


def missing(name: str) -> str | None:
    """What a target lacks here that only the machine to deploy on needs; None: nothing, or a run needs it all."""
    if name != "trt":
        return None
    from compressor.targets.tensorrt import target as trt

    return trt.missing()


__all__ = [
    "ENGINE_FILES",
    "TARGETS",
    "TOLERANCE",
    "Build",
    "BuildOptions",
    "Engine",
    "Feeds",
    "Precision",
    "Provider",
    "check",
    "missing",
    "span",
    "target",
]
