"""The weights that a plan belongs to: their fingerprints, their file, and the initializers that hold them."""
