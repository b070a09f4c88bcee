"""The verbs, by theme. Those that only look at a bundle import no torch, and no module imports it by itself."""
