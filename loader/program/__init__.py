"""The graph as a callable: bound to tensors, run instruction by instruction. Nothing is traced or generated."""
