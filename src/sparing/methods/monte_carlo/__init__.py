"""Monte-Carlo Attention: the value projection from few sampled features, with error bounds."""

from sparing.methods.monte_carlo.method import MonteCarlo

__all__ = ["MonteCarlo"]
