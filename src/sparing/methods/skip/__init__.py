"""Exact scores, without the values of keys of small weight."""

from sparing.methods.skip.method import Skip

__all__ = ["Skip"]
