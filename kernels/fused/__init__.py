"""Steps of arithmetic and sums along rows, in one launch."""
