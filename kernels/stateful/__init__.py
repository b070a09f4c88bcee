"""What ops with a state share: their two forms, the walks over packed sequences, their records. It has no op."""
