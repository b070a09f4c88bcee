"""FX graphs as passes see them: side tables, patterns, and ways to edit and to compute."""
