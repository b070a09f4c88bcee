"""What tensors in few bits mean: the formulas, for the loader and for ops that compute with such tensors."""
