"""Attention in a graph: its sites, their operands and their masks."""
