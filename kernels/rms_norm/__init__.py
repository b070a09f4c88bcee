"""Root mean square norm, alone and with the residual sum before it."""
