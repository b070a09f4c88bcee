"""The attention of RWKV: a mean of values whose weights decay, but for the token's own."""
