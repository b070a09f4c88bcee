"""The front door of Precast."""

__version__ = "0.1.0"
