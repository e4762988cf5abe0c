"""KeyClusters attention: exact where it matters, clusters of keys elsewhere."""

from sparing.methods.key_clusters.method import KeyClusters

__all__ = ["KeyClusters"]
