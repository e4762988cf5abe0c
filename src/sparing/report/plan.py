"""Print a plan within 100 columns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.table import Table

from sparing.report.terminal import Terminal
from sparing.workbench.planning.result import Plan, plain_percent
from sparing.workbench.planning.search import StepFigures
from sparing.workbench.timing import Interval

_BEST = 3  # candidates that are shown where none is worth it


def show(plan: Plan, *, console: Terminal) -> None:
    """Print what to do, what is promised and on which figures, and what runs where."""
    console.print(plan.reason, style="bold")
    cut = f", {plan.truncated} of them cut" if plan.truncated else ""
    cut += f", {plan.skipped} more left out: empty, of one token, or the same again" if plan.skipped else ""
    threads = plan.machine.get("threads")
    console.print(
        f"{plan.model} ({plan.kind}, {plan.dtype}) on {_cases(plan)}{cut}; "
        f"{plan.machine.get('cpu')}, {threads} thread{'s' * (threads != 1)}"
    )
    for note in plan.notes:
        console.print(note, style="yellow")
    console.print(_figures(plan))
    if plan.holds:
        console.print(_layers(plan))
    elif not any(one.used for one in plan.candidates) and any(one.gain for one in plan.candidates):
        console.print(_candidates(plan))


def _cases(plan: Plan) -> str:
    if plan.metric == "needle":
        return f"{plan.documents} made-up texts with facts, of up to {plan.tokens} tokens"
    if plan.generates:
        return f"{plan.data}: {plan.documents} passages of {plan.tokens} tokens"
    return f"{plan.data}: {plan.documents} documents of up to {plan.tokens} tokens"


def _figures(plan: Plan) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("promise", plan.promised)
    for found in plan.checks:
        table.add_row("held out", _said(found, plan, f" ({plain_percent(found.most)} of all at most)"))
    if plan.calibration is not None:
        table.add_row("calibration", _said(plan.calibration, plan))
    if plan.gain is not None:
        what = "time" if plan.objective == "time" else "peak memory"
        table.add_row("gain", f"{_ratio(plan.gain)}: {what} of the exact model / with the recipe")
    if plan.ceiling is not None:
        table.add_row("ceiling", f"{_ratio(plan.ceiling)}: with what saves most in every layer")
    return table


def _said(found: StepFigures, plan: Plan, bound: str = "") -> str:
    if plan.metric == "needle":
        return f"step {found.step} of {plan.steps}: {found.violations} of {found.documents} facts lost{bound}"
    return (
        f"step {found.step} of {plan.steps}: {found.violations} of {found.documents} beyond{bound}; "
        f"mean {plain_percent(found.mean)}, worst {plain_percent(found.worst)}"
    )


def _ratio(gain: Interval) -> str:
    return f"{gain.median:.2f}x ({gain.low:.2f} to {gain.high:.2f})"


def _layers(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    for name, right in (("layers", False), ("method", False), (_raced(plan), True), ("damage", True)):
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    speeds = {one.method: one.gain for one in plan.candidates}
    rows = plan.records()
    for spec in dict.fromkeys(row["method"] for row in rows):
        members = [row for row in rows if row["method"] == spec]
        gain = speeds.get(spec)
        damage = plain_percent(sum(row["damage"] for row in members)) if plan.damages and spec != "exact" else ""
        table.add_row(
            together([row["layer"] for row in members]), spec,
            "" if gain is None else f"{gain.median:.2f}x", damage,
        )  # fmt: skip
    what = "speed" if plan.objective == "time" else "memory"
    if plan.generates:
        table.caption = "Token: speed of a generated token against exact attention, above 1 is better."
        return table
    table.caption = (
        f"Attention: {what} of a call against exact attention, above 1 is better. Damage: change at the end of the "
        "model where one such layer alone is approximated, summed over the layers."
    )
    return table


def together(names: Sequence[str]) -> str:
    """Return the names of layers in short.

    >>> together(["layer.0.attention", "layer.1.attention", "layer.2.attention", "layer.5.attention"])
    'layer.0-2,5.attention'
    """
    matches = [re.fullmatch(r"(\D*)(\d+)(\D*)", name) for name in names]
    if len(names) < 2 or len({match.group(1, 3) for match in matches if match}) != 1 or not all(matches):
        return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
    found = [match for match in matches if match]
    numbers = [int(match.group(2)) for match in found]
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    spans = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    return f"{found[0].group(1)}{spans}{found[0].group(3)}"


def _raced(plan: Plan) -> str:
    """Return the name of what candidates were timed in."""
    return "token" if plan.generates else "attention"


def _candidates(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("best candidates")
    table.add_column(_raced(plan), justify="right")
    raced = [(one.gain, one.method) for one in plan.candidates if one.gain is not None]
    for gain, method in sorted(raced, reverse=True)[:_BEST]:
        table.add_row(method, f"{gain.median:.2f}x")
    return table
