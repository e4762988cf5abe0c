"""Nystromformer: attention through landmark means."""

from sparing.methods.nystrom.method import Nystrom

__all__ = ["Nystrom"]
