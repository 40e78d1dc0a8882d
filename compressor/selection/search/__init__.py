"""Searches by evaluation, one file a search. To add one: write the file, add one line to `SEARCHES`."""

from collections.abc import Callable

from compressor.selection.search.astar import AStarSearch
from compressor.selection.search.base import Head, Search, Step, SubsetEvaluator
from compressor.selection.search.greedy import LocalSearch
from compressor.selection.search.greedy_by_index import GlobalSearch
from compressor.selection.search.random_subsets import RandomSearch
from compressor.selection.search.taylor import TaylorSearch

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
    "SubsetEvaluator",
    "TaylorSearch",
]
