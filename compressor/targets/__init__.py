"""The runtimes to build for, by name.

To add one, write a package whose `target` module defines `TARGET`, and add one line to `TARGETS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from compressor.errors import ErrorCode, UsageError, suggestion
from compressor.targets.base import (
    QUANTIZED,
    TOLERANCE,
    WEIGHT_BITS,
    BuildOptions,
    Engine,
    Feeds,
    Precision,
    Provider,
    Target,
    WeightPrecision,
    span,
)

TARGETS: Mapping[str, str] = {
    "ort": "compressor.targets.onnxruntime.target",
    "openvino": "compressor.targets.openvino.target",
    "trt": "compressor.targets.tensorrt.target",
}
"""Name -> module that defines the target, imported on first use."""
DEFAULT_TARGET = "ort"
"""The target where none is named; it also proves and measures on the CPU where another target is missing."""


def target(name: str) -> Target:
    """The target of a name; calling it builds an engine.

    The object exists on any machine; `Target.check` and `Target.missing` tell whether its runtime is installed.

    Raises:
        UsageError: there is no target of this name.
    """
    if name not in TARGETS:
        text = f"{name}: unknown target; {suggestion(name, tuple(TARGETS))}"
        raise UsageError(text, code=ErrorCode.UNKNOWN_NAME, field="target", value=name)
    return import_module(TARGETS[name]).TARGET


def target_of(path: Path) -> Target:
    """The target with the longest suffix of engine files that a path ends with; the default target for other paths."""
    suffixes = {suffix: runtime for runtime in map(target, TARGETS) for suffix in runtime.suffixes}
    matching = filter(path.name.endswith, suffixes)
    return suffixes.get(max(matching, key=len, default=""), target(DEFAULT_TARGET))


def cached_target(folder: Path) -> Target:
    """The target whose engines of a model that generates are in a folder; the default target runs the graphs too."""
    runtimes = filter(lambda runtime: runtime.session_files(folder), map(target, TARGETS))
    return next(runtimes, target(DEFAULT_TARGET))


def unused_options(name: str) -> frozenset[str]:
    """Fields of `BuildOptions` that only other targets use."""
    every = frozenset(option for runtime in map(target, TARGETS) for option in runtime.options)
    return every - target(name).options


__all__ = [
    "DEFAULT_TARGET",
    "QUANTIZED",
    "TARGETS",
    "TOLERANCE",
    "WEIGHT_BITS",
    "BuildOptions",
    "Engine",
    "Feeds",
    "Precision",
    "Provider",
    "Target",
    "WeightPrecision",
    "cached_target",
    "span",
    "target",
    "target_of",
    "unused_options",
]
