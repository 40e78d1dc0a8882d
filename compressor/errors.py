"""Exceptions: each has a code for programs, a one-line message for people (what, why, how to fix it), an exit code."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from enum import StrEnum, auto
from pathlib import Path
from typing import Any, ClassVar, Self


class Code(StrEnum):
    """A name for programs and tests, and what it means: `FILE_MISSING = auto()` has the value `file-missing`.

    Attributes:
        meaning: what the name means; empty where the name says it.
    """

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[str]) -> str:
        return name.lower().replace("_", "-")


class ErrorCode(Code):
    """The kind of an error, for programs and tests: codes are stable, messages may change.

    `CompressorError.details` names what the error is about (`field`, `path`, `value`, ...).
    """

    UNSPECIFIED = auto()

    # Requests: flags, recipes and names.
    UNKNOWN_NAME = auto(), "A flag, key, method, target, option or other name is not among those that exist."
    OUT_OF_RANGE = auto()
    INVALID_VALUE = auto(), "A value cannot be converted to the type of its field."
    CONTRADICTION = auto(), "Two values exclude each other, or one has no meaning without the other."
    MISSING_VALUE = auto(), "A required value is missing."
    OUTPUT_EXISTS = auto()
    UNSAFE_RECIPE = auto(), "A model folder's own recipe sets a field that only flags and named recipes may set."
    IMPORT_FAILED = auto(), "The module of a custom task raises an error when it is imported."
    TASK_FAILED = auto(), "A method of a custom task raises an error, or returns something else than it has to."

    # Files and models.
    FILE_MISSING = auto()
    FILE_UNREADABLE = auto(), "A file is damaged, or its content is not of the kind that its name indicates."
    FILE_UNWRITABLE = auto()
    FILE_MISMATCH = auto(), "A file belongs to another model, graph, machine or version."
    PLAN_MISMATCH = auto(), "A plan or a mask names other sites than the model has, or sites of other kinds or sizes."
    UNSAFE_CODE = auto(), "Pickled weights or Python files of a model folder, which run only when a flag permits it."
    WEIGHTS_MISSING = auto(), "A model needs tensors that its files lack."
    NOT_FINITE = auto(), "NaN or infinity where a number is needed."
    UNSUPPORTED_MODEL = auto(), "A model whose class, head, family or configuration does not support the request."
    EXPORT_FAILED = auto()

    # Rows.
    COLUMN_MISSING = auto(), "The rows lack a column: a requested one, or every usual name of one."
    INVALID_ROWS = auto(), "Rows, or a cell of a row, are not in the form that the task reads."
    TOO_FEW_ROWS = auto()
    ROWS_OVERLAP = auto(), "Rows of a certificate are training rows too."
    LABEL_MISMATCH = auto(), "The labels do not correspond to the classes of the model."
    ID_OUTSIDE_TABLE = auto(), "A token or a token type has no row in the table of the model that it indexes."

    # Computed results.
    BUDGET_UNREACHABLE = auto(), "No pruned model meets the budgets; `least` has the least that is reachable for each."
    PRODUCTS_IN_FLOAT = auto(), "The runtime computes products in floats that the graph has in int8."
    NUMBERS_DIFFER = auto(), "Two models, graphs or engines of a run should compute the same function but differ."
    SITE_REFUSED = auto(), "A site cannot be gated or shrunk."
    METRIC_FELL = auto()
    NOTHING_REMOVED = auto(), "No head can be removed within the loss allowed."
    TOO_LONG = auto(), "A row or a length exceeds what the model or its masks cover."
    RUN_DIFFERS = auto(), "A folder holds the work of another run."

    # Resources of the machine.
    DISK_FULL = auto()
    OUT_OF_MEMORY = auto()
    FOLDER_BUSY = auto()
    PACKAGE_MISSING = auto()
    DEVICE_MISSING = auto()
    UNSUPPORTED = auto(), "A runtime, device, version or format lacks e.g. a precision, an operator or an element type."
    RUNTIME_FAILED = auto(), "A runtime, a driver or a compiler reports an error; the message quotes it."

    # Inputs, outputs and speed of a model.
    TENSOR_MISMATCH = auto(), "An input or output is missing or empty, or has another type or shape than required."
    OUTPUTS_DIFFER = auto(), "Outputs that must be equal within a tolerance are not."
    TOO_SLOW = auto(), "A model is slower than its baseline permits, or misses a latency bound."

    # Inference servers and worker processes.
    SERVER_UNREACHABLE = auto()
    SERVER_TIMEOUT = auto()
    SERVER_ERROR = auto(), "The server reports an internal error, or its response violates the protocol."
    REQUEST_REFUSED = auto(), "The server rejects a request as invalid."
    ACCESS_DENIED = auto(), "The server wants credentials that a request lacks."
    CERTIFICATE_UNTRUSTED = auto(), "The certificate of a server is signed by an authority that is not trusted here."
    MODEL_NOT_READY = auto(), "The server has no such model, or has not loaded it."
    CHECK_INTERRUPTED = auto(), "A latency check ended before its measurements were complete."
    PROCESS_ENDED = auto(), "A worker process ended before it returned a result."


class CompressorError(Exception):
    """Base class of the errors that compressor raises on purpose.

    Args:
        message: one line: what happened, why, and how to fix it.
        code: the kind of the error.
        details: what the error is about, by name, e.g. `field="keep"`, `path=Path("rows.tsv")`.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str = "", *, code: ErrorCode = ErrorCode.UNSPECIFIED, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.details = details

    @classmethod
    def of_file(cls, path: Path | str, problem: str, code: ErrorCode, **details: Any) -> Self:
        """The error of a file or a folder.

        Args:
            path: the file or folder, which the message begins with, and the detail `path`.
            problem: what is wrong with it, and how to correct it.
            code: the kind of the error.
            **details: further details.
        """
        return cls(f"{path}: {problem}", code=code, path=path, **details)


class UsageError(CompressorError):
    """Flags or a recipe that request something that does not exist."""

    exit_code = 2


class BudgetError(UsageError):
    """Budgets that no pruned model meets.

    `details` has `budgets`; `least`, the least cost that is reachable for each of them when the others are ignored; and
    `exceeded`, the indices of the budgets below that (empty: each can be met alone, but not all together). Where some
    are exceeded, `parts` has what each least cost is made of: `heads` and `neurons` that may not be removed, and the
    `rest`.
    """


class InputError(CompressorError):
    """A model folder, plan, graph or data file that cannot be used."""

    exit_code = 3


class RowError(InputError):
    """A row that cannot be used.

    `details` has `source`, the name of its rows; `row`, its number there, counted from 1; `problem`, what is wrong with
    it; and `file`, the path of its file, where that is known.
    """

    @classmethod
    def of(
        cls, source: str, row: int, problem: str, *, code: ErrorCode = ErrorCode.INVALID_ROWS, **details: Any
    ) -> RowError:
        """The error of a row.

        Args:
            source: name of the rows, e.g. the path of their file.
            row: number of the row, counted from 1.
            problem: what is wrong with the row, and how to correct it.
            code: the kind of the error.
            **details: further details, e.g. `column`.
        """
        message = f"{source}: row {row}: {problem}"
        return cls(message, code=code, source=source, row=row, problem=problem, **details)

    def at(self, file: Path | None, row: int) -> RowError:
        """This error with the row's file, if it is known, and its number there."""
        location = {"row": row} if file is None else {"row": row, "source": str(file), "file": file}
        return RowError.of(code=self.code, **{**self.details, **location})


class MetricDropError(CompressorError):
    """The output folder is complete, but the metric fell by more than `--max-drop` allows."""

    exit_code = 4


class MismatchError(CompressorError):
    """Two stages of a run should compute the same numbers but differ."""

    exit_code = 5


class TargetMissingError(CompressorError):
    """This machine lacks the runtime or the device of the requested target."""

    exit_code = 6

    @classmethod
    def of_package(cls, package: str, extra: str, text: str, **details: Any) -> TargetMissingError:
        """The error of a package that is not installed.

        Args:
            package: name of the distribution.
            extra: the extra of this project that installs it.
            text: what is not installed, and what it is needed for.
            **details: further details.
        """
        remedy = f"pip install '.[{extra}]' in a checkout of compressor"
        return cls(f"{text}; {remedy}", code=ErrorCode.PACKAGE_MISSING, package=package, **details)


class SlowdownError(CompressorError):
    """A model is slower than its baseline allows, or misses a latency bound."""

    exit_code = 7


class SiteRefusedError(CompressorError):
    """A site could not be gated or shrunk; the message names it and the operator or family that prevents it."""

    exit_code = 8


class DivergedError(CompressorError):
    """A loss, gradient, weight or metric became NaN or infinite during training."""

    exit_code = 9


class ServerError(CompressorError):
    """An inference server is unreachable, lacks the model, does not respond in time, or stopped during a request."""

    exit_code = 10


_LISTED = 20
"""Longest list of names that is printed beside the most similar one."""


def most_similar(name: str, names: Sequence[str]) -> str | None:
    """The most similar of `names`, or None if none is similar."""
    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


def suggestion(name: str, names: Sequence[str]) -> str:
    """How to correct a name that is not among `names`: the most similar one, and all of them if they are few."""
    match = most_similar(name, names)
    questions = [f"did you mean {match}?"] if match else []
    choices = [f"choose one of {', '.join(names)}"] if not match or len(names) <= _LISTED else []
    return " ".join(questions + choices)
