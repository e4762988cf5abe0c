"""Attention that reads few keys, and copies of few bits of all others."""

from sparing.methods.multipole.method import Multipole

__all__ = ["Multipole"]
