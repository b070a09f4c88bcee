"""The rules that a graph obeys, each with an id that stays."""
