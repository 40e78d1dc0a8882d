"""Choose units and refit the linears around them, from the activations of unlabelled rows and without training."""
