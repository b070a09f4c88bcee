"""The ops: each with its definition, its PyTorch reference and its kernels side by side."""
