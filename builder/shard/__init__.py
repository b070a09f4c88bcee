"""How a model is split over ranks: which layers, how far a split reaches, what becomes of graph and recipes."""
