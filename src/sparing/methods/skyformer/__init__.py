"""Skyformer: Gaussian kernel attention through a Nystrom approximation."""

from sparing.methods.skyformer.method import Skyformer

__all__ = ["Skyformer"]
