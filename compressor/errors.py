"""The exceptions of each stage and the exit code a user's shell sees. Messages are one line: what, why, how to mend."""

import difflib
from collections.abc import Sequence
from typing import ClassVar


class CompressorError(Exception):
    """Base of every error that the product raises on purpose."""

    exit_code: ClassVar[int] = 1


class UsageError(CompressorError):
    """Flags or a recipe that ask for something that does not exist."""

    exit_code = 2


class InputError(CompressorError):
    """A model folder, plan, graph or data file that cannot be used."""

    exit_code = 3


class GateError(CompressorError):
    """The result is there but costs more of the metric than `--max-drop` allows."""

    exit_code = 4


class MismatchError(CompressorError):
    """Two stages that must compute the same numbers do not."""

    exit_code = 5


class TargetMissingError(CompressorError):
    """The runtime or the device of the asked target is not on this machine."""

    exit_code = 6


class SlowdownError(CompressorError):
    """A latency gate: the model is slower than its baseline allows, or misses an absolute bound."""

    exit_code = 7


class SiteRefusedError(CompressorError):
    """A site could not be gated or shrunk; the message names it and the operator or family that is in the way."""

    exit_code = 8


class DivergedError(CompressorError):
    """Training met a loss or a gradient that is no finite number."""

    exit_code = 9


class ServerError(CompressorError):
    """An inference server that is not there, lacks the model, does not answer in time, or died midway."""

    exit_code = 10


_LISTED = 20
"""Names up to which all are told beside the nearest."""


def nearest(name: str, known: Sequence[str]) -> str:
    """How to mend a name that is not among `known`."""
    near = [f"did you mean {close}?" for close in difflib.get_close_matches(name, known, n=1)]
    every = [f"choose one of {', '.join(known)}"] if not near or len(known) <= _LISTED else []
    return " ".join(near + every)
