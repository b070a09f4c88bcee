"""Matrices whose rows and columns sum to one, by turns: the weights of hyper-connections."""
