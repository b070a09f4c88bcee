"""The choice of each token's experts."""
