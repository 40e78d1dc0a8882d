"""Searches that evaluate subsets, one file a search. To add one: write its file, add one line to `config.methods`."""

from compressor.selection.search.base import Decision, Head, Search, SubsetEvaluator, all_heads

__all__ = ["Decision", "Head", "Search", "SubsetEvaluator", "all_heads"]
