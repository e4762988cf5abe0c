"""Attention that reads few keys, and copies of few bits of all others."""

from sparing.methods.sketch.method import Sketch

__all__ = ["Sketch"]
