"""Shared by several methods: runs of a model over calibration rows, layer by layer, and sums over inputs of linears."""
