"""From a model's checkpoint conventions to recipes."""
