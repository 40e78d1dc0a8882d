"""Choose units and refit the linears they end in, from the activations of unlabelled rows and without training."""
