"""Pruning of heads and neurons under budgets: what plans cost, how many units meet that, and their weights."""
