"""Searches by evaluation, one file a search. To add one: write the file, add one line to `SEARCHES`."""

from collections.abc import Callable

from compressor.heads.search.astar import AStarSearch
from compressor.heads.search.base import Head, Search, Step, Trials
from compressor.heads.search.global_ import GlobalSearch
from compressor.heads.search.local import LocalSearch
from compressor.heads.search.random_ import RandomSearch
from compressor.heads.search.taylor import TaylorSearch

SEARCHES: dict[str, Callable[..., Search]] = {
    "taylor": TaylorSearch,
    "astar": AStarSearch,
    "local": LocalSearch,
    "global": GlobalSearch,
    "random": RandomSearch,
}
"""Method name -> search, called with its options."""

__all__ = [
    "SEARCHES",
    "AStarSearch",
    "GlobalSearch",
    "Head",
    "LocalSearch",
    "RandomSearch",
    "Search",
    "Step",
    "TaylorSearch",
    "Trials",
]
