"""Linear layers, where torch is not the fastest."""
