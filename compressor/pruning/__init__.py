"""Pruning of heads and neurons under budgets: what plans cost, how many units meet that, and the weights that remain.

Groups, a model with a method, costs and constraints go in; numbers of units, weights and loss curves come out.
"""
