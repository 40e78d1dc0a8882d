"""The evaluation of subsets on workers of Ray."""
