"""From a bundle and a checkpoint to tokens, on the target machine; runs no graph pass and imports no model code."""
