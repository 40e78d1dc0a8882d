"""Selection and reconstruction of units without training, from sums over the inputs of the linear that follows them."""
