"""sparing: models that spend their attention sparingly."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparing import methods as _methods  # noqa: F401  (registers the methods)
from sparing import nn, oracles
from sparing.attention import Inspection, attention, inspect
from sparing.index import Index
from sparing.method import Cost, Method, Projection, Shape, Supports, Unsupported, method, methods
from sparing.spec import split_specs
from sparing.version import __version__

if TYPE_CHECKING:
    from sparing import transformers
    from sparing.measure.compare import compare
    from sparing.planning.plan import plan
    from sparing.transformers import Recipe, approximate, extend_positions

__all__ = [
    "Cost",
    "Index",
    "Inspection",
    "Method",
    "Projection",
    "Recipe",
    "Shape",
    "Supports",
    "Unsupported",
    "__version__",
    "approximate",
    "attention",
    "compare",
    "extend_positions",
    "inspect",
    "method",
    "methods",
    "nn",
    "oracles",
    "plan",
    "split_specs",
    "transformers",
]

#: What needs transformers, which is imported when one of these is first used.
_LAZY = ("Recipe", "approximate", "compare", "extend_positions", "plan", "transformers")
_ELSEWHERE = {"compare": "sparing.measure.compare", "plan": "sparing.planning.plan"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'sparing' has no attribute {name!r}")
    try:
        package = import_module(_ELSEWHERE.get(name, "sparing.transformers"))
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            f"sparing.{name} needs transformers; run: pip install 'transformers>=5.4'", name="transformers"
        ) from None
    return package if name == "transformers" else getattr(package, name)


def __dir__() -> list[str]:
    return sorted(__all__)
