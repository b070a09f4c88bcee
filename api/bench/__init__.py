"""What is measured on the machine at hand, and kept as data."""
