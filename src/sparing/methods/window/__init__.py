"""Sliding-window attention with sinks and global tokens."""

from sparing.methods.window.method import Window

__all__ = ["Window"]
