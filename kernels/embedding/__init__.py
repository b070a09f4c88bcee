"""The embedding table's rows."""
