"""How quantised checkpoints are stored, a file for each method that their configs name."""
