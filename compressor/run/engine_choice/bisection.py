"""Bisection over the number of products in floats, where each attempt builds an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def smallest_that_holds(maximum: int, attempt: Callable[[int], T], holds: Callable[[T], bool]) -> T | None:
    """The attempt with the smallest number that holds, by bisection; None if none holds.

    Args:
        maximum: largest number to attempt; the smallest is 1.
        attempt: makes the attempt of a number.
        holds: whether an attempt holds; with a larger number it is assumed to hold too.
    """
    best, low, high = None, 1, maximum + 1
    while low < high:
        count = (low + high) // 2
        attempted = attempt(count)
        if holds(attempted):
            best, high = attempted, count
        else:
            low = count + 1
    return best
