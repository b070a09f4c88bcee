"""Attention whose keys and values are products of a latent that all heads share, and the cache of such latents."""
