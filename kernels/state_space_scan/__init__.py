"""The state space layer of Mamba 2: one decay for each head and token."""
