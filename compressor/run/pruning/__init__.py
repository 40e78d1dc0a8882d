"""Pruning heads and neurons under a budget: cost tables, allocation, and the search for the fastest plan."""
