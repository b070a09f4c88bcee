"""From FX to the bundle: the last checks, the bundle's graph, its layers stored once, the files."""
