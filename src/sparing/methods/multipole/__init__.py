"""Multipole attention: exact where it matters, clusters of keys elsewhere."""

from sparing.methods.multipole.method import Multipole

__all__ = ["Multipole"]
