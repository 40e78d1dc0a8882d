"""The pool of a method: the heads that compete, and the number that it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from compressor.errors import ErrorCode, UsageError
from compressor.units import Site
from graph_passes.plan import Kind


def pool_of(sites: Sequence[Site], options: Mapping[str, Any]) -> list[Site]:
    """The sites whose heads compete under a method's options: those that the option `pool` names.

    Raises:
        UsageError: the model has no attention of this kind.
    """
    pool = options.get("pool", "model")
    if pool not in get_args(Kind):
        return list(sites)
    members = [site for site in sites if site.kind == pool]
    if not members:
        kinds = tuple(dict.fromkeys(site.kind for site in sites))
        raise UsageError(
            f"option pool={pool}: the model has no attention of this kind; choose among {', '.join(kinds)}",
            code=ErrorCode.UNSUPPORTED_MODEL,
            field="pool",
            value=pool,
            choices=kinds,
        )
    return members


def heads_to_keep(keep: int | str, heads: int, flag: str = "--keep") -> int:
    """The number of heads that `keep` describes: a count (36, "36"), or a share ("50%", rounded to the nearest head).

    Args:
        keep: a count or a share.
        heads: the number of heads to choose from.
        flag: the flag that set it, for the error message.

    Raises:
        UsageError: `keep` is neither, or out of range.
    """
    text = str(keep).strip()
    try:
        count = round(heads * float(text[:-1]) / 100) if text.endswith("%") else int(text)
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{flag} {text!r}: neither a count nor a share; give a number such as 36, or 50%",
            code=ErrorCode.INVALID_VALUE,
            field="keep",
            value=keep,
        ) from error
    check_count(count, heads, f"{flag} {text}", keep)
    return count


def check_count(count: int, maximum: int, setting: str, value: int | str) -> None:
    """Raise unless a number of units to keep is possible.

    Args:
        count: the number.
        maximum: the number of units to choose from.
        setting: what set it, with its value, for the error message.
        value: its value.

    Raises:
        UsageError: `count` is out of range.
    """
    if not 0 <= count <= maximum:
        raise UsageError(
            f"{setting}: there are {maximum} to choose from; give a number from 0 to {maximum}, or 0% to 100%",
            code=ErrorCode.OUT_OF_RANGE,
            field="keep",
            value=value,
            maximum=maximum,
        )
