"""From a config to an FX graph: a module of transformers, with its attention and friends routed to our ops."""
