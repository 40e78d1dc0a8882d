"""Searches by evaluation, one file a search. To add one: write the file, add one line to `SEARCHES`."""

from collections.abc import Callable

from compressor.heads.search.base import Head, Search, Step, Trials
from compressor.heads.search.taylor import TaylorSearch

SEARCHES: dict[str, Callable[..., Search]] = {
    "taylor": TaylorSearch,
}
"""Method name -> search, called with its options."""

__all__ = ["SEARCHES", "Head", "Search", "Step", "TaylorSearch", "Trials"]
