"""Ops that round what they compute to few bits, for the linear layers behind them, and where a graph gets them."""
