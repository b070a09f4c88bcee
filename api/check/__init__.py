"""Whether what was built computes what transformers computes."""
