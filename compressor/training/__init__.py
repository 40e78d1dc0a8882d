"""Training of models, with gates, with masks, or from scratch, on transformers' Trainer.

Only the interface of a gate is known here (`compressor.units.gate`); methods that select heads are in
`compressor.selection`.
"""
