"""The graph as a callable: bound to tensors, run step by step. Nothing is traced or generated."""
