"""What combines the tensors of the ranks that share a layer, and the groups of ranks that do it."""
