"""Numbers of the delta rule that its definition, its kernels and its records share. No torch here."""

EPSILON = 1e-6
"""What is added to the sum of squares of a query or key that is normalised."""
