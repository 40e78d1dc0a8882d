"""What methods share: runs of a model over calibration rows, layer by layer, and sums over the inputs of its linears."""
