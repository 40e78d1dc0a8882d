"""Searches that evaluate subsets. To add one: write its class, and add one line to `config.methods`."""

from compressor.selection.search.base import Decision, Head, Search, SubsetEvaluator, all_heads

__all__ = ["Decision", "Head", "Search", "SubsetEvaluator", "all_heads"]
