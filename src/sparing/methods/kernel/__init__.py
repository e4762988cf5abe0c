"""Attention with another kernel in place of the exponential: polynomial, ELU, Gaussian."""

from sparing.methods.kernel.method import Kernel

__all__ = ["Kernel"]
