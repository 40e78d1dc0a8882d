"""MiniLM as people run it today beside what `compress` makes of it; `python -m benchmarks.rivals`."""
