"""Training of models on transformers' Trainer: with gates, with masks, or from scratch.

This package uses only the interface of a gate (`compressor.units.gate`); methods that select heads are in
`compressor.selection`.
"""
