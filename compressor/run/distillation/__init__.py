"""Training what is left of a model on the outputs of the whole model."""
