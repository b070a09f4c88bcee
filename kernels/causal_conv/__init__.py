"""The short causal convolution before state space and delta layers."""
