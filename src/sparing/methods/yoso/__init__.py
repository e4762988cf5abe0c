"""YOSO: Bernoulli sampling of attention through locality-sensitive hashing."""

from sparing.methods.yoso.method import Yoso

__all__ = ["Yoso"]
