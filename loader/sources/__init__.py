"""Checkpoints on servers: folders of files that are read over the network. No torch here.

`open` tells by a checkpoint's address which kind it is; `retries` is what all kinds share; `http` and `objects` are the
kinds. Directories of this machine are `precast.ir.weights.sources`'.
"""
