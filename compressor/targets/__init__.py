"""The runtimes to build for, by name: a package each, registered by one line in `compressor.config.targets`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from compressor.config.targets import TARGETS
from compressor.errors import ErrorCode, InputError, UsageError, nearest
from compressor.targets.base import TOLERANCE, BuildOptions, Engine, Feeds, Precision, Provider, Target, span


def target(name: str) -> Target:
    """The target of a name; calling it builds an engine.

    The object exists on any machine: whether its runtime does is for `Target.check` and `Target.missing` to tell.

    Raises:
        UsageError: there is no target of this name.
    """
    if name not in TARGETS:
        raise UsageError(
            f"{name}: unknown target; {nearest(name, tuple(TARGETS))}",
            code=ErrorCode.UNKNOWN_NAME,
            field="target",
            value=name,
        )
    runtime: Target = import_module(TARGETS[name]).TARGET
    return runtime


def target_of(path: Path) -> Target:
    """The target whose engines are files like this one, by its suffix.

    Raises:
        InputError: no target has engines with this suffix.
    """
    suffixes = {suffix: runtime for runtime in map(target, TARGETS) for suffix in runtime.suffixes}
    if path.suffix not in suffixes:
        raise InputError(
            f"{path}: unknown kind of engine; name a file that ends in {', '.join(suffixes)}",
            code=ErrorCode.INVALID_VALUE,
            path=path,
        )
    return suffixes[path.suffix]


def check(name: str, precision: Precision, provider: Provider | None, kernel: Path | None = None) -> None:
    """Raise where a target cannot be built for on this machine; see `Target.check`."""
    target(name).check(precision=precision, provider=provider, kernel=kernel)


def missing(name: str) -> str | None:
    """What this machine lacks for a target; see `Target.missing`."""
    return target(name).missing()


ENGINE_FILES = {name: target(name).engine_file for name in TARGETS}
"""Target name -> name of the file that its runtime loads."""

__all__ = [
    "ENGINE_FILES",
    "TARGETS",
    "TOLERANCE",
    "BuildOptions",
    "Engine",
    "Feeds",
    "Precision",
    "Provider",
    "Target",
    "check",
    "missing",
    "span",
    "target",
    "target_of",
]
