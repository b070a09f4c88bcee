"""A backend that runs a model through the CUDA driver alone: no torch, no Triton, no compiler."""
