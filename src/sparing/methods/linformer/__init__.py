"""Linformer: attention over projected keys and values."""

from sparing.methods.linformer.method import Linformer

__all__ = ["Linformer"]
