"""Linear attention: a decaying sum of key-value products, read by queries."""
