"""Attention over entries, one for each block of tokens: how they are made, kept, selected and attended to."""
