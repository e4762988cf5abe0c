"""Attention within buckets of a locality-sensitive hash (Reformer and relatives)."""

from sparing.methods.lsh.method import Lsh

__all__ = ["Lsh"]
