"""The state space layer of Mamba 1: one decay for each channel, state row and token."""
