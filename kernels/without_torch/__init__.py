"""What computes torch's own ops where there is no torch: launches, which are data."""
