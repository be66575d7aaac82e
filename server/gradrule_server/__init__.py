"""The server of gradrule."""

__version__ = "0.1.0"
