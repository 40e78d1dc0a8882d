"""What methods share: runs of a model over calibration rows, layer by layer, and sums over inputs of its linears."""
