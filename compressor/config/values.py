"""Types of the fields of a configuration. Each reads the text of a flag as well as the value in a file."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from compressor.config.fields import InvalidValueError, as_list
from compressor.errors import ErrorCode

MixedPrecision = Literal["no", "bf16"]
"""Precision of matmuls, with float32 weights: float32 or bfloat16."""
GroupBy = Literal["kv", "query"]
"""How query heads that share key/value heads are removed: all those of one together, or as many of each."""

PLAIN_TEXT, PARQUET = ".txt", ".parquet"
TABLES = (".tsv", ".csv")
ROW_FORMATS = (*TABLES, ".jsonl", PLAIN_TEXT, ".conll", PARQUET)
"""Suffixes of files of rows."""
ARRAYS = ".npz"
"""Suffix of files of arrays, which are the rows of a bare ONNX graph."""
PACKED = (".xz", ".gz")
"""Suffixes of compressed files of rows, behind those of their formats."""
_WORKERS = r"local(:[1-9]\d*)?|(?!local:)(\[.+\]|[^:/\s]+):\d{1,5}"


def _as_table(value: Any) -> Any:
    """A table: text such as `tau_ini=100,cooldown=0.5` (as a flag gives it) becomes a dictionary."""
    if not isinstance(value, str):
        return value
    table = dict[str, Any]()
    for part in as_list(value):
        name, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise InvalidValueError("give name=value pairs separated by commas")
        if name in table:
            raise InvalidValueError(f"{name} is set twice; set it once", ErrorCode.CONTRADICTION)
        try:
            table[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            table[name] = text
    return table


def _as_share(value: Any) -> Any:
    """The share that `90%` or a number from 0 to 1 stands for."""
    is_percentage = isinstance(value, str) and "%" in value
    try:
        share = float(value.removesuffix("%")) / 100 if is_percentage else float(value)
        if isinstance(value, bool):
            raise TypeError
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidValueError("not a share; give a number from 0 to 1, or a percentage such as 90%") from error
    if not 0.0 <= share <= 1.0:
        percentage = f"{share:g}" if not is_percentage and 1 < share <= 100 else "90"
        raise InvalidValueError(
            f"out of range; give a number from 0 to 1, or a percentage such as {percentage}%", ErrorCode.OUT_OF_RANGE
        )
    return share


def _check_budget(share: float) -> float:
    if not share:
        raise InvalidValueError(
            "nothing of the model would remain; give a share above 0%, such as 50%", ErrorCode.OUT_OF_RANGE
        )
    return share


def _as_count_or_share(value: Any) -> Any:
    text = str(value).strip()
    try:
        number = float(text[:-1]) if text.endswith("%") else int(text)
    except ValueError as error:
        raise InvalidValueError("neither a count nor a share; give a number such as 36, or 50%") from error
    if not number > 0 or (text.endswith("%") and number > 100):  # without heads no token depends on another
        raise InvalidValueError(
            "out of range, so that no head would remain; give a number from 1, or a share above 0% such as 50%",
            ErrorCode.OUT_OF_RANGE,
        )
    return f"{number:.15g}%" if text.endswith("%") else number


def _check_workers(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(_WORKERS, value):
        raise InvalidValueError("invalid value; use local, local:4 for four workers, or HOST:PORT of a Ray cluster")
    return value


def _check_block_size(value: int) -> int:
    if value != 1 and (value < 8 or value % 8):
        raise InvalidValueError(
            "not a block size; give a multiple of 8 such as 64, or 1 for single entries", ErrorCode.OUT_OF_RANGE
        )
    return value


def _check_shape(value: str) -> str:
    sizes = value.lower().split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise InvalidValueError("not a shape; give the batch size and the length in tokens, such as 1x128")
    return "x".join(str(int(size)) for size in sizes)


def as_milliseconds(value: Any) -> float:
    """The milliseconds that `5ms`, `0.2s` or `800us` stands for; a number without a unit is refused."""
    match = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(us|ms|s)", str(value).strip())
    if match is None:
        raise InvalidValueError("not a time with a unit; give a time such as 5ms, 800us or 0.2s")
    milliseconds = float(match[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[match[2]]
    if not 0 < milliseconds < math.inf:
        raise InvalidValueError("out of range; give a time above zero, such as 5ms", ErrorCode.OUT_OF_RANGE)
    return milliseconds


def names_row_file(path: Path) -> bool:
    """Whether the suffix of a path is that of a file of rows, compressed or not."""
    return path.suffix.lower() in (*ROW_FORMATS, *PACKED, ARRAYS)


def _as_rows(value: Any) -> Any:
    """A source of rows as text; an empty one would be the current directory."""
    if value == "":
        raise InvalidValueError("is empty; name a file, a folder or a data set of rows")
    return str(value) if isinstance(value, Path) else value


def _as_time(value: Any) -> str:
    return f"{as_milliseconds(value):g}ms"


PER_TOKEN = "/token"
"""End of a time of a token."""


def milliseconds_of(time: str | None) -> float | None:
    """The number of a time such as `5ms` or `20ms/token`; None for None."""
    return None if time is None else float(time.removesuffix(PER_TOKEN).removesuffix("ms"))


def _as_latency(value: Any) -> str:
    text = str(value).strip()
    return _as_time(text.removesuffix(PER_TOKEN)) + (PER_TOKEN if text.endswith(PER_TOKEN) else "")


Milliseconds = Annotated[str, BeforeValidator(_as_time)]
"""A time with its unit: `5ms`."""
CallTime = Annotated[str, BeforeValidator(_as_latency)]
"""A time of a call, `5ms`, or of a token that a model generates, `20ms/token`."""
Keep = Annotated[int | str, BeforeValidator(_as_count_or_share)]
"""Heads to keep: a count, or a share such as `50%`."""
Workers = Annotated[str, BeforeValidator(_check_workers)]
"""Where Ray runs workers: `local`, `local:4`, or `HOST:PORT`."""
Names = Annotated[tuple[str, ...], BeforeValidator(as_list)]
Rows = Annotated[str | None, BeforeValidator(_as_rows)]
"""A path of rows, or the name of a data set."""
Share = Annotated[float, BeforeValidator(_as_share)]
BudgetShare = Annotated[Share, AfterValidator(_check_budget)]
"""A share of the whole model to keep."""
AttentionKind = Literal["bidirectional", "causal", "cross"]
"""`graph_passes.Kind`, repeated so that reading a recipe does not load the graph libraries."""
ShareByKind = Annotated[dict[AttentionKind, Share], BeforeValidator(_as_table)]
BlockSize = Annotated[int, AfterValidator(_check_block_size)]
MapsFile = Annotated[Path, AfterValidator(lambda path: path / "maps.safetensors" if path.is_dir() else path)]
"""A file of attention maps, which has a fixed name where the path is the folder of a run."""
AbsolutePath = Annotated[Path, AfterValidator(Path.absolute)]
Shapes = Annotated[tuple[Annotated[str, AfterValidator(_check_shape)], ...], BeforeValidator(as_list)]
"""Batch sizes with lengths in tokens: `1x32,1x128`."""
Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), BeforeValidator(as_list)]
Options = Annotated[dict[str, Any], BeforeValidator(_as_table)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""A seed that every generator of random numbers takes."""
Threads = Annotated[int, Field(ge=1, le=4096)]
"""Threads of an engine; many more cannot be started."""
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
