"""The version, kept apart so that building needs no torch."""

__version__ = "0.1.0"
