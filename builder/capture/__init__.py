"""From a config to an FX graph: a module of transformers, its attention, experts and recurrences routed to our ops."""
