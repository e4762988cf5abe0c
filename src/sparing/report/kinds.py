"""The kinds of JSON files that `sparing show` opens, each recognised by entries that no other kind has.

Other packages add kinds by the entry-point group `sparing.shown`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparing.report import bench, lists, padded, plan, table
from sparing.report.terminal import Terminal
from sparing.transformers.recipe import Recipe
from sparing.workbench.benchmark.padded import PaddedBench
from sparing.workbench.benchmark.results import Bench
from sparing.workbench.comparison.verdict import Comparison
from sparing.workbench.planning.result import Plan


@dataclass(frozen=True)
class Kind:
    """A kind of JSON file.

    The content is not trusted: `read` must raise a ValueError for everything that `show` cannot print.
    """

    name: str
    entries: tuple[str, ...]  #: names of entries at the top; a file with all of them is of this kind
    read: Callable[[dict[str, Any]], Any]
    show: Callable[[Any, Terminal], None]


KINDS = (
    Kind(
        "comparison",
        ("rows", "summary"),
        Comparison.from_dict,
        lambda found, console: table.show(found, console=console),
    ),
    Kind("plan", ("promise", "recipe"), Plan.from_dict, lambda found, console: plan.show(found, console=console)),
    Kind(
        "benchmark", ("settings", "timings"), Bench.from_dict, lambda found, console: bench.show(found, console=console)
    ),
    Kind(
        "benchmark of padded batches",
        ("batches", "padding"),
        PaddedBench.from_dict,
        lambda found, console: padded.show(found, console=console),
    ),
    Kind("recipe", ("layers", "version"), Recipe.of, lists.show_recipe),
)
