"""The files of a plan: its JSON, what is wrong with it, and the masks beside it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import safetensors.numpy
from pydantic_core import ErrorDetails
from safetensors import SafetensorError

from graph_passes.block_sparse.masks import BlockMask
from graph_passes.errors import GraphErrorCode, PlanError
from graph_passes.plan.groups import SitePlan


def read_text(path: Path) -> str:
    """The text of a plan.

    Raises:
        PlanError: the file is missing or unreadable.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise PlanError(
            f"{path}: there is no such plan; give the path of a plan.json",
            code=GraphErrorCode.FILE_MISSING,
            path=path,
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise PlanError(
            f"{path}: cannot be read as a plan ({reason}); give the path of a plan.json",
            code=GraphErrorCode.FILE_UNREADABLE,
            path=path,
        ) from error


def with_short_lists(text: str) -> str:
    """JSON with each list of numbers on one line; a feed-forward has thousands of neurons."""

    def join(numbers: re.Match[str]) -> str:
        return "[" + " ".join(numbers[1].split()) + "]"

    return re.sub(r"\[\n([\d\s.,eE+-]+)\]", join, text)  # strings have no line breaks


def load_masks(path: Path, sites: Iterable[SitePlan]) -> dict[str, BlockMask]:
    """The masks of the sites that have one, by name of the site.

    Args:
        path: the file of the masks.
        sites: the sites of the plan.

    Raises:
        PlanError: the file is missing or unreadable, or lacks a mask, or a mask is invalid.
    """
    try:
        tensors = safetensors.numpy.load(path.read_bytes())
    except FileNotFoundError as error:
        raise PlanError(
            f"{path}: there is no such file, but it holds the plan's masks; put it beside the plan",
            code=GraphErrorCode.FILE_MISSING,
            path=path,
        ) from error
    except (OSError, SafetensorError) as error:
        raise PlanError(
            f"{path}: cannot be read as masks ({error}); learn the plan again",
            code=GraphErrorCode.FILE_UNREADABLE,
            path=path,
        ) from error
    masks = {}
    for site in sites:
        if site.mask is None:
            continue
        kept = tensors.get(site.mask)
        if kept is None:
            raise PlanError(
                f"{path}: the mask {site.mask} of site {site.name} is missing; learn the plan again",
                code=GraphErrorCode.MASK_MISSING,
                path=path,
                site=site.name,
            )
        try:
            masks[site.name] = BlockMask(kept.astype(np.bool_), site.block, site.memory)
        except ValueError as error:
            raise PlanError(
                f"{path}: {site.mask}: {error}", code=GraphErrorCode.INVALID_PLAN, path=path, site=site.name
            ) from error
    return masks


def located_in_file(fault: ErrorDetails, text: str) -> ErrorDetails:
    """A fault with the location in the file: without the types of groups, and with the key of version 1."""
    location = fault["loc"]
    if location[:1] != ("groups",):
        return fault
    if len(location) > 2:
        location = (*location[:2], *location[3:])
    with contextlib.suppress(ValueError):
        if "sites" in json.loads(text):
            location = ("sites", *location[1:])
    return {**fault, "loc": location}


def field_of(fault: ErrorDetails) -> str:
    """The field in which a plan violates the schema, e.g. `groups[0].kept`; empty for the whole plan."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")


def describe_fault(fault: ErrorDetails) -> str:
    """What is wrong with a plan, for people who do not know pydantic."""
    field = field_of(fault)
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    match fault["type"]:
        case "json_invalid":
            return f"is not JSON ({message.removeprefix('Invalid JSON: ')})"
        case "missing":
            return f"{field} is missing"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"{field} is not a key of a plan"
        case "value_error":
            return message
        case "literal_error" if field == "version":
            return f"version {fault['input']!r:.40} cannot be read, only versions 1 and 2"
    return f"{field or 'the plan'} is {fault['input']!r:.40} and {message}"
