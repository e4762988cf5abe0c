"""sparing: models that spend their attention sparingly."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparing import methods, nn, oracles
from sparing.contract import Cost, Method, Projection, Shape, Supports, Unsupported, list_methods, method
from sparing.functional import Inspection, attention, inspect
from sparing.index import Index
from sparing.version import __version__

if TYPE_CHECKING:
    from sparing import transformers
    from sparing.transformers import Recipe, approximate, extend_positions, restore
    from sparing.workbench.comparison.compare import compare
    from sparing.workbench.comparison.verdict import Comparison
    from sparing.workbench.planning.plan import plan
    from sparing.workbench.planning.result import Plan

__all__ = [
    "Comparison",
    "Cost",
    "Index",
    "Inspection",
    "Method",
    "Plan",
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
    "list_methods",
    "method",
    "methods",
    "nn",
    "oracles",
    "plan",
    "restore",
    "transformers",
]

#: Names of earlier versions -> what to use instead.
_OLD = {
    "measure": "sparing.workbench",
    "planning": "sparing.workbench.planning",
    "presets": "sparing.models",
    "split_specs": "sparing.spec.split_specs",
    "studies": "sparing_lab.studies",
    "tasks": "sparing_lab.tasks",
    "training": "sparing_lab.training",
}


#: What needs transformers, which is imported when one of these is first used.
_LAZY = (
    "Comparison",
    "Plan",
    "Recipe",
    "approximate",
    "compare",
    "extend_positions",
    "plan",
    "restore",
    "transformers",
)
_ELSEWHERE = {
    "Comparison": "sparing.workbench.comparison.verdict", "Plan": "sparing.workbench.planning.result",
    "compare": "sparing.workbench.comparison.compare", "plan": "sparing.workbench.planning.plan",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _OLD:
        raise AttributeError(f"module 'sparing' has no attribute {name!r} any more; use {_OLD[name]}")
    if name not in _LAZY:
        raise AttributeError(f"module 'sparing' has no attribute {name!r}")
    try:
        package = import_module(_ELSEWHERE.get(name, "sparing.transformers"))
        if name in _ELSEWHERE:
            import_module("sparing.report.page")  # draws what the workbench finds
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            f"sparing.{name} needs transformers; run: pip install 'transformers>=5.4'", name="transformers"
        ) from None
    return package if name == "transformers" else getattr(package, name)


def __dir__() -> list[str]:
    return sorted(__all__)
