"""What a recipe asks of learning, read and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from compressor.errors import UsageError, nearest


def heads_to_keep(keep: int | str, heads: int, flag: str = "--keep") -> int:
    """The count that `keep` asks for of `heads`: a count (36, "36") or a share ("50%", rounded to the nearest head).

    Args:
        keep: what was asked for.
        heads: of the whole model.
        flag: where, for the message.

    Raises:
        UsageError: it is neither, or out of range.
    """
    text = str(keep).strip()
    try:
        count = round(heads * float(text[:-1]) / 100) if text.endswith("%") else int(text)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{flag} {text!r}: neither a count nor a share; give a number such as 36, or 50%") from error
    if not 0 <= count <= heads:
        raise UsageError(
            f"{flag} {text}: there are {heads} heads to choose from; give a number from 0 to {heads}, or 0% to 100%"
        )
    return count


def defaults(make: Callable[..., Any]) -> dict[str, Any]:
    """The options of a method, the keyword-only parameters of what makes it, at their defaults."""
    found = inspect.signature(make).parameters.values()
    return {option.name: option.default for option in found if option.kind is inspect.Parameter.KEYWORD_ONLY}


def read_options(method: str, options: Mapping[str, Any], *makers: Callable[..., Any]) -> list[dict[str, Any]]:
    """The options of a method, each of the type that its owner declares, the defaults filled in: one table a maker.

    Raises:
        UsageError: an option that no maker has, or a value of the wrong type.
    """
    known = [defaults(make) for make in makers]
    names = sorted(name for table in known for name in table)
    for name in options:
        if name not in names:
            raise UsageError(f"option {name!r} of {method}: unknown; {nearest(name, names)}")
    tables = []
    for make, table in zip(makers, known, strict=True):
        hints = get_type_hints(make.__init__ if inspect.isclass(make) else make, include_extras=True)
        given = {name: _typed(method, name, options[name], hints[name]) for name in table if name in options}
        tables.append({**table, **given})
    return tables


def _typed(method: str, name: str, value: Any, kind: Any) -> Any:
    try:
        return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        fault = error.errors()[0]["msg"]
        raise UsageError(f"option {name}={value!r} of {method}: {fault}; mend its value") from error
