"""Studies in the terminal, and the ledger of all claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table as RichTable
from rich.text import Text

from sparing.from_json import build, parse
from sparing.report.kinds import Kind
from sparing.report.terminal import Terminal
from sparing.store import verify_checksum
from sparing_lab.studies import NAMES, study
from sparing_lab.studies.judges import Verdict
from sparing_lab.studies.run import FORMAT, Outcome
from sparing_lab.studies.study import PAPERS, Settings, Study
from sparing_lab.studies.tables import Table

_COLOURS: dict[Verdict, str] = {"reproduces": "green", "same shape": "yellow", "does not": "red", "not run": "dim"}
_HEAD = """# What the papers say, and what we find

One row for each claim: where it stands, what the paper has, what we have, and whether that is the same. This page is
written by `{command}`; each row's criterion stands in the study's file, and a test holds it to results that must fail.

**reproduces**: the criterion is met. **same shape**: the figures differ, but what they show is there. **does not**: it
is not; the paragraph below the table says more. **not run**: it needs weights or data that were not there.

The papers' claims: {counts}. Questions of our own stand apart. {machine}. Scale: {scale}.
"""


def _table(**options: Any) -> RichTable:
    return RichTable(box=None, header_style="bold", title_justify="left", title_style="bold", pad_edge=False, **options)


def list_table() -> RichTable:
    """Return a table of all studies."""
    table = _table()
    for column in ("study", "of", "shows", "also takes"):
        table.add_column(column)
    for name in NAMES:
        each = study(name)
        table.add_row(name, each.where, each.title, " ".join(f"--{option}" for option in each.options))
    return table


def refuse_unused(studies: Sequence[Study], settings: Settings) -> None:
    """Raise if an option was given that none of the studies uses."""
    given = {"data": settings.data, "seeds": settings.seeds, "model": settings.model}
    for option, value in given.items():
        if value is not None and not any(option in each.options for each in studies):
            names = ", ".join(each.name for each in studies)
            raise ValueError(f"--{option}: {names} has no use for it")


def show(outcome: Outcome, *, console: Terminal) -> None:
    """Print the tables of a study, then its claims with verdicts."""
    held = parse(outcome.to_json())
    held.pop("format")
    _show(outcome.study, outcome.study.tables(outcome.rows), build(SavedStudy, held), console)


@dataclass(frozen=True)
class SavedClaim:
    """A claim with its verdict, as the JSON of a study holds it."""

    key: str
    where: str  #: in the paper
    states: str
    paper: str  #: its figures
    criterion: str
    ours: str  #: our figures
    verdict: Verdict
    question: Literal["ours", "paper"]  #: who asks it


@dataclass(frozen=True)
class SavedStudy:
    """The JSON of a study, checked."""

    study: str
    scale: str
    seconds: float
    machine: dict[str, Any]
    claims: tuple[SavedClaim, ...]
    rows: tuple[dict[str, Any], ...]


def _read(held: Mapping[str, Any]) -> tuple[SavedStudy, list[Table]]:
    """Return a study from its parsed JSON, with the tables of its rows; a ValueError says what is wrong."""
    held = verify_checksum(held)
    if held.pop("format", None) != FORMAT:
        raise ValueError(f"this format of a study is not known; this sparing reads {FORMAT}")
    found = build(SavedStudy, held)
    if found.study not in NAMES:
        raise ValueError(f"there is no study {found.study[:40]!r}; there are {', '.join(NAMES)}")
    try:
        return found, list(study(found.study).tables(found.rows))
    except Exception as error:  # the study relies on rows that it measured itself
        raise ValueError(f"rows are not those of {found.study} ({type(error).__name__}: {str(error)[:100]})") from None


def _show(each: Study, tables: Sequence[Table], found: SavedStudy, console: Terminal) -> None:
    console.print(f"{each.name}: {each.title} ({each.where})", style="bold")
    for one in tables:
        table = _table(title=one.title)
        for number, column in enumerate(one.columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in one.rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    claims = RichTable.grid(padding=(0, 2, 0, 0))
    claims.add_column(no_wrap=True)
    claims.add_column()
    for claim in found.claims:
        where = "our question" if claim.question == "ours" else claim.where
        lines = (
            f"{claim.states} ({where})", f"paper: {claim.paper}", f"ours: {claim.ours}",
            f"criterion: {claim.criterion}",
        )  # fmt: skip
        claims.add_row(Text(claim.verdict, style=_COLOURS[claim.verdict]), "\n".join(lines))
    console.print(claims)
    console.print(f"{found.seconds:.0f} s of work", style="dim")


KIND = Kind(  #: for `sparing show`
    "study",
    ("study", "claims"),
    _read,
    lambda saved, console: _show(study(saved[0].study), saved[1], saved[0], console),
)


def show_all(outcomes: Sequence[Outcome], *, console: Terminal) -> None:
    """Print a line for each study; questions of our own are counted apart."""
    table = _table(title="All studies: the papers' claims")
    for column in ("study", "seconds", *_COLOURS, "ours"):
        table.add_column(column, justify="left" if column == "study" else "right")
    total: Counter[str] = Counter()
    for outcome in outcomes:
        count = _counts(outcome)
        total += count
        table.add_row(
            outcome.study.name, f"{outcome.seconds:.0f}", *(str(count[key] or "") for key in (*_COLOURS, "ours"))
        )
    seconds = sum(outcome.seconds for outcome in outcomes)
    table.add_row("together", f"{seconds:.0f}", *(str(total[key]) for key in (*_COLOURS, "ours")), style="bold")
    console.print(table)


def _counts(outcome: Outcome) -> Counter[str]:
    return Counter("ours" if claim.ours else outcome.judgements[claim.key].verdict for claim in outcome.study.claims)


def ledger(outcomes: Sequence[Outcome]) -> str:
    """Return the ledger of all claims as a page in Markdown."""
    first = outcomes[0]
    here, settings = first.machine, first.settings
    where = f"{here['cpu']}, {here['threads']} threads, torch {here['torch']}, sparing {here['sparing']}"
    with_data = "" if settings.data is None else ", with the papers' data where they are there"
    total: Counter[str] = sum((_counts(outcome) for outcome in outcomes), Counter())
    counts = ", ".join(f"{total[verdict]} {verdict}" for verdict in _COLOURS)
    parts = [
        _HEAD.format(
            command=f"sparing study --all{_options(settings)} --write-docs", machine=where, counts=counts,
            scale=settings.scale + with_data,
        )
    ]  # fmt: skip
    for key, paper in PAPERS.items():
        mine = [outcome for outcome in outcomes if outcome.study.paper == key]
        if mine:
            parts.append(f"## {paper}\n")
        for outcome in mine:
            parts += _section(outcome)
    return "\n".join(parts)


def _options(settings: Settings, known: Sequence[str] = ("data", "seeds", "model")) -> str:
    """Return the options of the command that gives these results."""
    words = "" if settings.small else f" --scale {settings.scale}"
    words += " --data FOLDER" if settings.data is not None and "data" in known else ""
    words += f" --seeds {settings.seeds}" if settings.seeds is not None and "seeds" in known else ""
    return words + (f" --model {settings.model}" if settings.model is not None and "model" in known else "")


def _section(outcome: Outcome) -> list[str]:
    each, settings = outcome.study, outcome.settings
    command = f"sparing study {each.name}{_options(settings, each.options)}"
    lines = [f"### {each.name}", "", f"{each.title} ({each.where}). `{command}`, {outcome.seconds:.0f} s.", ""]
    for ours in (False, True):
        claims = [claim for claim in each.claims if claim.ours is ours]
        if not claims:
            continue
        lines += [
            f"| {'our question' if ours else 'claim'} | where | paper | ours | verdict |",
            "|---|---|---|---|---|",
        ]
        for claim in claims:
            judgement = outcome.judgements[claim.key]
            cells = (claim.states, claim.where, claim.paper, judgement.ours, f"**{judgement.verdict}**")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    for claim in each.claims:
        verdict = outcome.judgements[claim.key].verdict
        if verdict not in ("does not", "same shape"):
            continue
        finding = each.finding(claim.key) if settings.usual else ""
        said = f"{claim.states[0].upper()}{claim.states[1:]}: {verdict}"
        lines += [f'*{said}.* "Reproduces" takes: {claim.criterion}.{finding and f" {finding}"}', ""]
    return lines
