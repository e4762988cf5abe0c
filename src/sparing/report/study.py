"""Studies in the terminal, and the ledger of all claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from sparing.studies import NAMES, study
from sparing.studies.run import Outcome
from sparing.studies.study import PAPERS, Settings, Study, Verdict

_COLOURS: dict[Verdict, str] = {"reproduces": "green", "same shape": "yellow", "does not": "red", "not run": "dim"}
_HEAD = """# What the papers say, and what we find

One row for each claim: where it stands, what the paper has, what we have, and whether that is the same. This page is
written by `{command}`; each row's criterion stands in the study's file, and a test holds it to results that must fail.

**reproduces**: the criterion is met. **same shape**: the figures differ, but what they show is there. **does not**: it
is not; the paragraph below the table says more. **not run**: it needs weights or data that were not there.

{machine}. Scale: {scale}.
"""


def _table(**options: Any) -> RichTable:
    return RichTable(box=None, header_style="bold", title_justify="left", title_style="bold", pad_edge=False, **options)


def list_table() -> RichTable:
    """What studies there are."""
    table = _table()
    for column in ("study", "of", "shows", "also takes"):
        table.add_column(column)
    for name in NAMES:
        each = study(name)
        table.add_row(name, each.where, each.title, " ".join(f"--{option}" for option in each.options))
    return table


def refuse_unused(studies: Sequence[Study], settings: Settings) -> None:
    """An option that nothing would look at is a mistake."""
    given = {"data": settings.data, "seeds": settings.seeds, "model": settings.model}
    for option, value in given.items():
        if value is not None and not any(option in each.options for each in studies):
            names = ", ".join(each.name for each in studies)
            raise ValueError(f"--{option}: {names} has no use for it")


def show(outcome: Outcome, *, console: Console) -> None:
    """Tables, then claims."""
    each = outcome.study
    console.print(f"{each.name}: {each.title} ({each.where})", style="bold", markup=False, highlight=False)
    for found in each.tables(outcome.rows):
        table = _table(title=found.title)
        for number, column in enumerate(found.columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in found.rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    claims = RichTable.grid(padding=(0, 2, 0, 0))
    claims.add_column(no_wrap=True)
    claims.add_column()
    for claim in each.claims:
        judgement = outcome.judgements[claim.key]
        lines = (
            f"{claim.states} ({claim.where})", f"paper: {claim.paper}", f"ours: {judgement.ours}",
            f"criterion: {claim.criterion}",
        )  # fmt: skip
        claims.add_row(Text(judgement.verdict, style=_COLOURS[judgement.verdict]), Text("\n".join(lines)))
    console.print(claims)
    console.print(f"{outcome.seconds:.0f} s of work", style="dim", highlight=False)


def show_all(outcomes: Sequence[Outcome], *, console: Console) -> None:
    """A line for each study."""
    table = _table(title="All studies")
    for column in ("study", "seconds", *_COLOURS):
        table.add_column(column, justify="left" if column == "study" else "right")
    for outcome in outcomes:
        count = Counter(judgement.verdict for judgement in outcome.judgements.values())
        table.add_row(
            outcome.study.name, f"{outcome.seconds:.0f}", *(str(count[verdict] or "") for verdict in _COLOURS)
        )
    total = Counter(judgement.verdict for outcome in outcomes for judgement in outcome.judgements.values())
    seconds = sum(outcome.seconds for outcome in outcomes)
    table.add_row("together", f"{seconds:.0f}", *(str(total[verdict]) for verdict in _COLOURS), style="bold")
    console.print(table)


def ledger(outcomes: Sequence[Outcome]) -> str:
    """A page in Markdown."""
    first = outcomes[0]
    data = "" if first.settings.data is None else " --data FOLDER"
    here = first.machine
    where = f"{here['cpu']}, {here['threads']} threads, torch {here['torch']}, sparing {here['sparing']}"
    parts = [
        _HEAD.format(
            command=f"sparing study --all{data} --write-docs", machine=where,
            scale=first.settings.scale + (", with the papers' data where they are there" if data else ""),
        )
    ]  # fmt: skip
    for key, paper in PAPERS.items():
        mine = [outcome for outcome in outcomes if outcome.study.paper == key]
        if not mine:
            continue
        parts.append(f"## {paper}\n")
        for outcome in mine:
            parts += _section(outcome, data)
    return "\n".join(parts)


def _section(outcome: Outcome, data: str) -> list[str]:
    each = outcome.study
    option = data if "data" in each.options else ""
    lines = [
        f"### {each.name}", "",
        f"{each.title} ({each.where}). `sparing study {each.name}{option}`, {outcome.seconds:.0f} s.", "",
        "| claim | where | paper | ours | verdict |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for claim in each.claims:
        judgement = outcome.judgements[claim.key]
        cells = (claim.states, claim.where, claim.paper, judgement.ours, f"**{judgement.verdict}**")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines.append("")
    for claim in each.claims:
        if outcome.judgements[claim.key].verdict in ("does not", "same shape") and claim.otherwise:
            lines += [f"*{claim.states[0].upper()}{claim.states[1:]}*: {claim.otherwise}", ""]
    return lines
