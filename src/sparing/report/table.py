"""Print a comparison as terminal tables. Columns that a narrow terminal has no room for are left out, and named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rich import box
from rich.table import Table
from rich.text import Text

from sparing.report.numbers import ratio
from sparing.report.page_table import BASELINE, SCORES, by_verdict, generation_tables
from sparing.report.terminal import Terminal
from sparing.workbench.comparison.judgement import FASTER, KEPT, ORACLE, REFUSED, SLOWER, UNKNOWN, UNSAFE, UNTIMED
from sparing.workbench.comparison.summary import percentage, rounded
from sparing.workbench.comparison.verdict import Comparison, Row
from sparing.workbench.estimate import Estimate
from sparing.workbench.timing import Interval

_WORDS = {
    FASTER: Text("safe, faster", "bold green"), SLOWER: Text("safe, slower", "green"), UNSAFE: Text("not safe", "red"),
    UNTIMED: Text("safe, untimed", "green"), UNKNOWN: Text("cannot tell", "yellow"),
    ORACLE: Text("oracle", "dim"), REFUSED: Text("refused", "dim"),
}  # fmt: skip
_SHOWN = 8  # layers that have columns of their own, in 100 characters
_METHOD = 28  # characters that a method has at least before columns are left out for it
_LEFT_OUT = (  # where there is no room: the last one stays longest
    "keys", "error", "prompt", "index", "its speed", "attn.", "FLOPs\nsaved", "same", "at least", "cache", "from",
    "when",
)  # fmt: skip


def show(found: Comparison, *, console: Terminal, layers: bool = False) -> None:
    """Print the summary and the table; with `layers`, the errors of each layer, too."""
    console.print(found.headline, style="bold")
    console.print(found.summary)
    console.print(
        f"{found.model} ({found.kind}, {found.dtype}) on {found.data}: {found.cases}; "
        f"{found.machine.get('cpu')}, {found.machine.get('threads')} threads"
    )
    for note in found.notes:
        console.print(note, style="yellow")
    if (scores := score_table(found, console.width)) is not None:
        console.print(scores)
    if found.generation:
        for table in generation_tables_of(found, console.width):
            console.print(table)
        for each in found.generation:
            if each.reason:
                console.print(f"{each.verdict}: {each.method}, {each.when} at {each.context}: {each.reason}")
        for method, refused in {each.method: each.refused for each in found.generation if each.refused}.items():
            console.print(f"{method}: {refused}")
    if found.rows:
        console.print(comparison_table(found, console.width))
    for row in found.rows:
        if row.refused is not None or row.reason:
            console.print(f"{row.method}: {row.refused or row.reason}")
    if layers and any(row.layers for row in found.rows):
        console.print(layer_table(found, console.width))


def score_table(found: Comparison, width: int = 100) -> Table | None:
    """Return each method's scores against labels and what it loses; None without labels.

    Oracles, which are measured on fewer documents, are not in it.
    """
    rows = [row for row in by_verdict(found.rows) if row.end and row.verdict != ORACLE]
    names = [name for name in SCORES if rows and f"exact_{name}" in (rows[0].end or {})]
    if not names:
        return None
    titles = ["method", *(title for name in names for title in (name, f"{name}\nlost")), "verdict"]
    exact: list[str | Text] = [BASELINE]
    cells: list[list[str | Text]] = [exact]
    for name in names:
        exact += [_score((rows[0].end or {})[f"exact_{name}"]), ""]
    exact.append(Text("baseline", "bold"))
    for row in rows:
        end = row.end or {}
        scores = [(end[name], end[f"exact_{name}"] - end[name]) for name in names]
        cells.append([row.method, *(_score(x) for pair in scores for x in pair), _WORDS[row.verdict]])
    return _fitted(
        titles,
        cells,
        width,
        caption=_lost(found, names),
        title="Against the labels",
    )


def _lost(found: Comparison, names: Sequence[str]) -> str:
    said = "Lost: score of the exact model - that with the method."
    if found.kind == "encoder" and "accuracy" in names:
        said += " Accuracy: share of documents whose nearest other document has their label."
    return said


def _score(value: float) -> str:
    return f"{value:.4f}"


def comparison_table(found: Comparison, width: int = 100) -> Table:
    """Return the table of all rows, by verdict, with the exact model below what is faster."""
    titles = ["method", "change", "at most", "error", "keys", "FLOPs\nsaved", "call", "model", "from", "verdict"]
    ordered = by_verdict(found.rows)
    rows: list[list[str | Text]] = [[row.method, *_numbers(row), _WORDS[row.verdict]] for row in ordered]
    if any(row.time is not None for row in ordered):
        exact: list[str | Text] = [BASELINE, "0%", "0%", "0", "", "1x", "1x", "1x", "", Text("baseline", "bold")]
        rows.insert(sum(row.verdict == FASTER for row in ordered), exact)
    return _fitted(titles, rows, width, caption=_legend(found), explained=_EXPLAINED)


def _fitted(
    titles: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    width: int,
    caption: str,
    explained: Mapping[str, str] = MappingProxyType({}),
    **options: str,
) -> Table:
    """Return a table of a method, numbers and a verdict, without the columns that are empty or have no room.

    explained: sentences about columns, for the caption; those about columns that are left out do not stand there.
    """
    wide = [max(_width(cell) for cell in column) for column in zip(titles, *rows, strict=True)]
    kept = [place for place in range(len(titles)) if any(_width(row[place]) for row in rows)]

    def needed() -> int:
        return min(wide[0], _METHOD) + sum(wide[column] + 1 for column in kept[1:]) + 2

    missing = [title for title in _LEFT_OUT if title in titles and list(titles).index(title) in kept]
    out = []
    while needed() > width and missing:
        title = missing.pop(0)
        out.append(title.replace("\n", " "))
        kept.remove(list(titles).index(title))
    caption = " ".join([caption, *(said for title, said in explained.items() if list(titles).index(title) in kept)])
    if out:
        caption += f" A wider terminal also shows: {', '.join(out)}."
    table = _table(caption=caption, **options)
    room = width - sum(wide[column] + 1 for column in kept[1:]) - 2
    table.add_column("method", overflow="fold", max_width=max(room, 12))
    for column in kept[1:]:
        title = titles[column].replace("its speed", "speed")
        table.add_column(title, justify="left" if title == "verdict" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[column] for column in kept))
    return table


def _width(cell: str | Text) -> int:
    return max(map(len, (cell.plain if isinstance(cell, Text) else cell).split("\n")))


_GENERATION = (
    "After so many tokens of a passage, read exactly (decode) or by the method (always), the true next ones run one by "
    "one. Change: of their perplexity; at most: how far its 95 % interval reaches. Same: share of places where the "
    "most likely token is that of exact attention. Facts: kept of those in made-up texts that exact attention finds; "
    "at least: lower end of the 95 % interval. Safe: {rule}.",
    "Token, attention: time of one token, and of its attention in all layers; speed: time of exact attention, with the "
    "faster of transformers' caches, / time of the method. Prompt: with the index. Cache, index: "
    "memory of keys and values, and of what the method keeps beside them. Keys: what a token reads. From: tokens of "
    "context from which on a token is faster.",
)
_PAGE_ONLY = ("perplexity", "exact", "attention of it")  # columns for which 100 characters are too few
_SHORT = {
    "context": "after", "same token": "same", "facts kept": "facts", "attention": "attn.",
    "keys read": "keys", "faster from": "from",
}  # fmt: skip


def generation_tables_of(found: Comparison, width: int = 100) -> list[Table]:
    """Return the tables of generation: what it does, and what it costs."""
    made = []
    for (name, titles, rows), caption in zip(generation_tables(found), _GENERATION, strict=False):
        shown = [title for title in titles if title not in _PAGE_ONLY]
        lines: list[list[str | Text]] = []
        for cells in rows:
            held = dict(zip(titles, cells, strict=True))
            lines.append([_WORDS[held[title].text] if title == "verdict" else held[title].text for title in shown])
        title = f"Generation: {name[0].lower()}{name[1:]}"
        short = [_SHORT.get(each, each) for each in shown]
        made.append(_fitted(short, lines, width, caption=caption.format(rule=_rule(found)), title=title))
    return made


def _rule(found: Comparison) -> str:
    kept = f", and at least {KEPT:.0%} of the facts" if found.needs_facts else ""
    return f"{found.metric} within {percentage(found.tolerance)}{kept}"


def layer_table(found: Comparison, width: int = 100) -> Table:
    """Return the error of each layer, or of the worst, and how well the method's error bar ranks the true errors."""
    rows = [row for row in found.rows if row.layers]
    count = max(len(row.layers) for row in rows)
    most = _SHOWN if width >= 100 else _SHOWN // 2
    table = _table(
        title="Attention error by layer",
        caption="Error bar: rank correlation of the error that the method predicts for each query with the true one "
        "(1: it knows which rows are worst). Head: the worst of all layers, as layer.head. *: an oracle.",
    )
    table.add_column("method", overflow="fold", max_width=38)
    names = [str(i) for i in range(count)] if count <= most else ["worst layers"]
    for name in (*names, "mean", "head"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        star = " *" if row.verdict == ORACLE else ""
        table.add_row(row.method + star, *_by_layer([x.total for x in row.layers], count, most), _worst_head(row))
        bars = [layer.bar for layer in row.layers if layer.bar is not None]
        if bars:
            cells = [f"{bar:.2f}" for bar in bars] if count <= most else [f"{min(bars):.2f} at least"]
            table.add_row("  its error bar", *cells, f"{sum(bars) / len(bars):.2f}", "", style="dim")
    return table


def _table(**options: str) -> Table:
    return Table(
        title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip


def _by_layer(errors: list[float], count: int, most: int) -> list[str]:
    mean = _error(sum(errors) / len(errors))
    if count <= most:
        return [*(_error(x) for x in errors), *[""] * (count - len(errors)), mean]
    worst = sorted(range(len(errors)), key=lambda i: -errors[i])[:3]
    return ["  ".join(f"{i}: {_error(errors[i])}" for i in worst), mean]


def _worst_head(row: Row) -> str:
    error, layer, head = max((x, i, j) for i, layer in enumerate(row.layers) for j, x in enumerate(layer.heads))
    return f"{layer}.{head}: {_error(error)}"


def _numbers(row: Row) -> list[str]:
    if row.refused is not None:
        return [""] * 8
    assert row.error is not None
    time = row.time
    return [
        *_shares(row.change), _split(row.error.mean, row.substitution),
        "" if row.keys_read is None else f"{row.keys_read:.0f}",
        "" if row.flops_reduction is None else ratio(row.flops_reduction),
        *(_ratio(each, row.disturbed) for each in ((None, None) if time is None else (time.attention, time.model))),
        _tokens(row),
    ]  # fmt: skip


def _shares(value: Estimate | None) -> tuple[str, str]:
    """Return the mean and the upper end of its interval, in percent."""
    if value is None:
        return "", ""
    return _percent(value.mean), "?" if value.most is None else _percent(value.most)


def _percent(value: float) -> str:
    share = 100 * value
    if math.isnan(share):
        return "nan"
    return ">1000%" if not share < 1000 else f"{share:.0f}%" if abs(share) >= 10 else f"{share:.2f}%"


def _ratio(value: Interval | None, disturbed: str) -> str:
    return "" if value is None else "?" if disturbed else f"{value.median:.2f}x"


def _tokens(row: Row) -> str:
    """Return the number of tokens from which the call is faster."""
    if not row.points:
        return ""
    if row.crossover is None:
        return f">{row.points[-1].length}"
    return f"<{row.crossover}" if row.crossover <= row.points[0].length else rounded(row.crossover).replace(",", "")


def _split(total: float, substitution: float | None) -> str:
    return _error(total) if not substitution else f"{total:.2f} ({substitution:.2f})"


def _error(value: float) -> str:
    return "0" if value < 5e-6 else f"{value:.4f}" if value < 10 else f"{value:.3g}"


def _legend(found: Comparison) -> str:
    said = (
        f"Change: {found.metric}, over all documents; at most: how far its 95 % interval reaches, which must be within "
        f"{percentage(found.tolerance)} to be safe."
    )
    if any(row.verdict == ORACLE for row in found.rows):
        said += " Oracles: the best possible at their budget, on two documents; they need the exact result."
    return said


_EXPLAINED = {
    "error": "Error: relative L2 of the attention output, mean over layers (in brackets what the method would miss "
    "with any budget: it aims at another kernel).",
    "keys": "Keys: what a query reads.",
    "FLOPs\nsaved": "FLOPs saved: those of exact attention / those of the method.",
    "call": "Call, model: time of exact SDPA / time of the method, for the call of the middle layer and for the whole "
    "model, on a document of median length; above 1 is faster.",
    "from": "From: tokens from which on the call is faster here.",
}
