"""The exceptions of each stage: a code for programs, one line for people (what, why, how to mend), an exit code."""

import difflib
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar


class ErrorCode(StrEnum):
    """What went wrong, as programs and tests read it: codes stay while messages may change.

    A code names the kind of fault; `CompressorError.details` says what it happened to (`field`, `path`, `value`, ...).
    """

    UNSPECIFIED = "unspecified"

    # What was requested.
    UNKNOWN_NAME = "unknown-name"
    """A flag, key, method, target, option or other name is not among those that exist."""
    RENAMED = "renamed"
    """A flag or key that an earlier version had, under its former name."""
    OUT_OF_RANGE = "out-of-range"
    INVALID_VALUE = "invalid-value"
    """A value cannot be read as what its field holds."""
    CONTRADICTION = "contradiction"
    """Two values exclude each other, or one has no meaning without the other."""
    MISSING_VALUE = "missing-value"
    """A value that is needed was not given."""
    OUTPUT_EXISTS = "output-exists"
    UNSAFE_RECIPE = "unsafe-recipe"
    """The recipe inside a model folder sets a field that only the command line or `--recipe` may set."""

    # What was read.
    FILE_MISSING = "file-missing"
    FILE_UNREADABLE = "file-unreadable"
    """A file is damaged, or holds something else than its name says."""
    FILE_UNWRITABLE = "file-unwritable"
    FILE_MISMATCH = "file-mismatch"
    """A file belongs to another model, graph, machine or version."""
    PLAN_MISMATCH = "plan-mismatch"
    """A plan or a mask names other sites than the model has, or sites of other kinds or sizes."""
    UNSAFE_CODE = "unsafe-code"
    """Pickled weights or Python files of a model folder, which run only when a flag permits it."""
    WEIGHTS_MISSING = "weights-missing"
    """A model needs tensors that its files lack."""
    NOT_FINITE = "not-finite"
    """NaN or infinity where a number is needed."""
    UNSUPPORTED_MODEL = "unsupported-model"
    """A model whose class, head, family or configuration does not serve what is requested."""
    EXPORT_FAILED = "export-failed"

    # What the rows hold.
    COLUMN_MISSING = "column-missing"
    """The rows lack a column: a requested one, or every usual name of one."""
    INVALID_ROWS = "invalid-rows"
    """Rows, or the cell of one, are not what the task reads."""
    TOO_FEW_ROWS = "too-few-rows"
    LABEL_MISMATCH = "label-mismatch"
    """The labels do not correspond to the classes of the model."""

    # What was computed.
    NUMBERS_DIFFER = "numbers-differ"
    """Two products of a run that must compute the same function do not."""
    SITE_REFUSED = "site-refused"
    """A site cannot be gated or shrunk."""
    METRIC_FELL = "metric-fell"
    NOTHING_REMOVED = "nothing-removed"
    """No head can be removed within the loss allowed."""
    TOO_LONG = "too-long"
    """A row or a length exceeds what the model or its masks cover."""
    RUN_DIFFERS = "run-differs"
    """A folder holds the work of another run."""

    # What the machine has.
    DISK_FULL = "disk-full"
    OUT_OF_MEMORY = "out-of-memory"
    FOLDER_BUSY = "folder-busy"
    PACKAGE_MISSING = "package-missing"
    DEVICE_MISSING = "device-missing"
    UNSUPPORTED = "unsupported"
    """A runtime, a device, a version or a format lacks what is needed: a precision, an operator, an element type."""
    RUNTIME_FAILED = "runtime-failed"
    """A runtime, a driver or a compiler reports an error; the message repeats its words."""

    # What a model computes or takes.
    TENSOR_MISMATCH = "tensor-mismatch"
    """An input or output is missing or empty, or has another type or shape than required."""
    OUTPUTS_DIFFER = "outputs-differ"
    """Outputs that must be equal within a tolerance are not."""
    TOO_SLOW = "too-slow"
    """A model is slower than its baseline permits, or misses a latency bound."""

    # What an inference server does.
    SERVER_UNREACHABLE = "server-unreachable"
    SERVER_TIMEOUT = "server-timeout"
    SERVER_ERROR = "server-error"
    """The server reports a fault of its own, or its response breaks the protocol."""
    REQUEST_REFUSED = "request-refused"
    """The server rejects a request as invalid."""
    MODEL_NOT_READY = "model-not-ready"
    """The server has no such model, or has not loaded it."""
    CHECK_INTERRUPTED = "check-interrupted"
    """A latency check ended before all of it was measured."""
    PROCESS_ENDED = "process-ended"
    """A worker process ended before it returned a result."""


class CompressorError(Exception):
    """Base of every error that the product raises on purpose.

    Args:
        message: one line: what, why, how to mend.
        code: what went wrong.
        details: what it happened to, by name, e.g. `field="keep"`, `path=Path("rows.tsv")`.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str = "", *, code: ErrorCode = ErrorCode.UNSPECIFIED, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.details = details


class UsageError(CompressorError):
    """Flags or a recipe that ask for something that does not exist."""

    exit_code = 2


class InputError(CompressorError):
    """A model folder, plan, graph or data file that cannot be used."""

    exit_code = 3


class MetricDropError(CompressorError):
    """The output folder is complete, but the metric fell by more than `--max-drop` allows."""

    exit_code = 4


class MismatchError(CompressorError):
    """Two stages that must compute the same numbers do not."""

    exit_code = 5


class TargetMissingError(CompressorError):
    """The runtime or the device of the asked target is not on this machine."""

    exit_code = 6


class SlowdownError(CompressorError):
    """A model is slower than its baseline allows, or misses a latency bound."""

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
"""Longest list of names that is printed beside the most similar one."""


def closest(name: str, names: Sequence[str]) -> str | None:
    """The most similar of `names`, or None if none is similar."""
    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


def nearest(name: str, names: Sequence[str]) -> str:
    """How to correct a name that is not among `names`: the most similar one, and all of them if they are few."""
    match = closest(name, names)
    suggestion = [f"did you mean {match}?"] if match else []
    choices = [f"choose one of {', '.join(names)}"] if not match or len(names) <= _LISTED else []
    return " ".join(suggestion + choices)
