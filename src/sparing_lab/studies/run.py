"""Run a study from its first cell to its verdicts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparing.store import Store, write_files
from sparing.workbench.cells import measured
from sparing.workbench.machine import machine
from sparing_lab.figure import drawn
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row
from sparing_lab.studies.study import Settings, Study

FORMAT = 1  #: version of the JSON files


@dataclass(frozen=True)
class Outcome:
    """The results of a study."""

    study: Study
    settings: Settings
    rows: tuple[Row, ...]
    judgements: Mapping[str, Judgement]  #: by the claims' keys
    seconds: float  #: of all work, including that of earlier runs
    machine: Mapping[str, Any]

    def to_json(self) -> str:
        """Return all results as JSON."""
        claims = [
            {
                "key": claim.key, "where": claim.where, "states": claim.states, "paper": claim.paper,
                "criterion": claim.criterion, "ours": self.judgements[claim.key].ours,
                "verdict": self.judgements[claim.key].verdict, "question": "ours" if claim.ours else "paper",
            }
            for claim in self.study.claims
        ]  # fmt: skip
        held = {
            "format": FORMAT, "study": self.study.name, "scale": self.settings.scale, "seconds": self.seconds,
            "machine": dict(self.machine), "claims": claims, "rows": list(self.rows),
        }  # fmt: skip
        return json.dumps(held, indent=1) + "\n"


def run(
    study: Study,
    settings: Settings,
    store: Store,
    *,
    progress: Callable[[str, int, int], None] = lambda text, done, steps: None,
) -> Outcome:
    """Measure the cells that are not kept in the store, one after the other, and judge the claims."""
    here = machine()
    of: dict[str, Any] = {
        "study": study.name, "version": study.version, "scale": settings.scale,
        "versions": [here["torch"], here["transformers"], here["sparing"]],
    }  # fmt: skip
    if study.timed:
        of["machine"] = here
    given = list(study.cells(settings))
    cells = [{**of, "cell": dict(cell)} for cell in given]
    done = 0

    def work(cell: Cell) -> dict[str, Any]:
        start = time.perf_counter()
        found = study.measure(settings, cell["cell"])
        return {"found": found, "seconds": time.perf_counter() - start}

    def tell(cell: Cell, again: bool) -> None:
        nonlocal done
        done += 1
        progress(_words(study, cell["cell"]), done, len(cells))

    progress(study.name, 0, len(cells))
    results = measured(cells, work, store, check=_check, done=tell)
    rows: list[Row] = []
    for cell, result in zip(given, results, strict=True):
        found = result["found"] if isinstance(result["found"], list) else [result["found"]]
        rows += [{**cell, **each} for each in found]
    judgements = {claim.key: claim.judge(rows) for claim in study.claims}
    return Outcome(study, settings, tuple(rows), judgements, sum(result["seconds"] for result in results), here)


def _check(cell: Cell, result: Any) -> None:
    """Raise ValueError for a kept result without its rows or its time."""
    found = result.get("found") if isinstance(result, dict) else None
    rows = found if isinstance(found, list) else [found]
    if not all(isinstance(row, dict) for row in rows) or not isinstance(result.get("seconds"), float):
        raise ValueError("a result must hold rows under 'found' and 'seconds'")


def write(outcome: Outcome, folder: Path) -> list[Path]:
    """Write the results as JSON and as a figure, both or none."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{outcome.study.name}.json", folder / f"{outcome.study.name}.png"]
    figure = drawn(lambda figure: outcome.study.draw(outcome.rows, figure), written[1])
    write_files({written[0]: outcome.to_json(), written[1]: figure})
    return written


def _words(study: Study, cell: Cell) -> str:
    """Return the label of a progress bar."""
    shown = " ".join(str(value) for value in cell.values() if isinstance(value, str | int | float))
    return f"{study.name}: {shown}"[:60]
