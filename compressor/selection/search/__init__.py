"""Searches that evaluate subsets, one file a search. To add one: write its file, add one line to `config.methods`."""

from compressor.selection.search.astar import AStarOptions, AStarSearch
from compressor.selection.search.base import Decision, Head, Search, SubsetEvaluator, all_heads
from compressor.selection.search.greedy import GreedySearch
from compressor.selection.search.greedy_by_index import GreedyByIndexSearch
from compressor.selection.search.random_subsets import RandomOptions, RandomSearch
from compressor.selection.search.taylor import TaylorOptions, TaylorSearch

__all__ = [
    "AStarOptions",
    "AStarSearch",
    "Decision",
    "GreedyByIndexSearch",
    "GreedySearch",
    "Head",
    "RandomOptions",
    "RandomSearch",
    "Search",
    "SubsetEvaluator",
    "TaylorOptions",
    "TaylorSearch",
    "all_heads",
]
