"""The settings of the engines that may be built: target, precision, and the form of an engine in 8 bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compressor.config.sections import AUTO, EngineConfig
from compressor.results import Candidate
from compressor.targets import QUANTIZED, TARGETS, Precision, target

PORTABLE, SYMMETRIC, DYNAMIC = "portable", "symmetric", "dynamic"
"""Forms of an engine in 8 bits: built from the portable or a symmetric quantized graph, or quantized by the target."""

MIXED = "where faster"
"""Part of the label of an engine in 8 bits that computes in floats what is slower in int8."""


@dataclass(frozen=True)
class Choice:
    """The settings of an engine.

    Attributes:
        config: target and precision.
        form: `PORTABLE`, `SYMMETRIC` or `DYNAMIC` for an engine in 8 bits; empty for an engine in floats.
        mixes: whether matmuls stay in floats if their widths are slower in int8 on this machine.
        in_float: names of the matmuls of the quantized graph that were returned to floats, for a proof or the metric.
    """

    config: EngineConfig
    form: str = ""
    in_float: tuple[str, ...] = ()
    mixes: bool = False

    @property
    def row(self) -> Candidate:
        """The row of a table of candidates, without measurements."""
        count = len(self.in_float)
        returned = f"{count} product{'s' if count > 1 else ''} in floats" if count else ""
        form = ", ".join(filter(None, (self.form, MIXED if self.mixes else "", returned)))
        return Candidate(target=self.config.target, precision=self.config.precision, form=form, in_float=self.in_float)

    @property
    def quantized_graph(self) -> str | None:
        """Name of the quantized graph that it is built from; None: it is built from the float graph."""
        if self.form not in (PORTABLE, SYMMETRIC):
            return None
        return target(self.config.target).quantized_graph(self.config.definite_precision)

    @property
    def label(self) -> str:
        """The settings for readers, e.g. `openvino int8 portable`."""
        return self.row.label


def choices(config: EngineConfig, *, has_rows: bool = True) -> list[Choice]:
    """Every engine that a configuration allows, in the order in which they are tried.

    The time to try engines may be limited, so one engine in 8 bits of each runtime comes first, and floats come last.

    Args:
        has_rows: whether there are rows to calibrate on; without rows, engines in 8 bits are left out.
    """
    names = tuple(TARGETS) if config.target == AUTO else (config.target,)
    groups: list[list[Choice]] = [[], [], []]
    for name, precision in _precisions(names, config):
        engine = config.model_copy(update={"target": name, "precision": precision})
        if precision not in QUANTIZED:
            groups[-1].append(Choice(engine))
            continue
        if not has_rows:
            continue
        mixes = config.precision == AUTO and precision == "int8" and "float_widths" in target(name).options
        forms = [SYMMETRIC if target(name).symmetric else PORTABLE]
        if target(name).quantizes and precision == "int8":
            forms.insert(0, DYNAMIC)
        for number, form in enumerate(forms):
            groups[number].append(Choice(engine, form, mixes=mixes))
    return list(itertools.chain(*groups))


def _precisions(names: Sequence[str], config: EngineConfig) -> Iterator[tuple[str, Precision]]:
    """Each target with each precision that is tried there."""
    for name in names:
        precisions = target(name).tried_precisions if config.precision == AUTO else (config.definite_precision,)
        yield from ((name, precision) for precision in precisions)
