"""The rows whose logits are wanted."""
