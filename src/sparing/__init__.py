"""sparing: models that spend their attention sparingly."""

from sparing import methods as _methods  # noqa: F401  (registers the methods)
from sparing import nn, oracles
from sparing.attention import Inspection, attention, inspect
from sparing.method import Cost, Method, Projection, Shape, Supports, Unsupported, method, methods
from sparing.spec import split_specs
from sparing.version import __version__

__all__ = [
    "Cost",
    "Inspection",
    "Method",
    "Projection",
    "Shape",
    "Supports",
    "Unsupported",
    "__version__",
    "attention",
    "inspect",
    "method",
    "methods",
    "nn",
    "oracles",
    "split_specs",
]
