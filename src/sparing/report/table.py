"""Comparisons as a terminal table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from sparing.measure.compare import Comparison
from sparing.measure.timing import Interval
from sparing.method import Supports

LETTERS = {
    "causal": "C",
    "key_padding": "P",
    "attn_mask": "M",
    "cross_attention": "X",
    "gqa": "Q",
    "gradient": "G",
    "training_free": "T",
}


def capabilities(supports: Supports) -> str:
    """One letter per capability, a dot where it is missing: "CPMXQGT"."""
    return "".join(letter if getattr(supports, name) else "." for name, letter in LETTERS.items())


def comparison_table(rows: Sequence[Comparison], *, title: str) -> Table:
    """The table that `sparing compare` prints."""
    table = Table(title=title, title_justify="left", caption=_legend(), caption_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    for name in ("substit.", "approx.", "total", "worst", "FLOPs", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("can", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.method) + (" *" if row.method.oracle else " +" if row.method.supports.projection else ""),
            *(_error(e) for e in (*row.error, row.worst)),
            f"{row.flops:.2f}x",
            _interval(row.speed),
            capabilities(row.method.supports),
        )
    return table


def layer_table(rows: Sequence[Comparison]) -> Table:
    """The table that `sparing compare --layers` adds."""
    legend = (
        "Error bar: rank correlation of the error that the method predicts for each query with the true one (1: it "
        "knows which rows are worst)."
    )
    table = Table(
        title="Total error by layer", title_justify="left", caption=legend, caption_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("method", no_wrap=True)
    for number in range(max(len(row.layers) for row in rows)):
        table.add_column(str(number), justify="right", no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(str(row.method), *(_error(e) for e in (*row.layers, row.error.total)))
        if row.bars is not None:
            table.add_row("  its error bar", *(f"{bar:.2f}" for bar in (*row.bars, sum(row.bars) / len(row.bars))))
    return table


def show(rows: Sequence[Comparison], *, title: str, layers: bool = False) -> None:
    """Print the table; on a narrow terminal lines wrap, since a number that is cut off is worse."""
    console = Console(width=max(Console().width, 130))
    console.print(comparison_table(rows, title=title))
    if layers:
        console.print(layer_table(rows))


def _interval(speed: Interval | None) -> str:
    return "-" if speed is None else f"{speed.median:.2f}x ({speed.low:.2f}-{speed.high:.2f})"


def _error(value: float) -> str:
    return "0" if value < 5e-6 else f"{value:.4f}" if value < 10 else f"{value:.3g}"


def _legend() -> str:
    letters = ", ".join(f"{letter} {name.replace('_', ' ')}" for name, letter in LETTERS.items())
    return (
        "Errors: relative L2 of the attention output, mean over layers (worst: the worst one). Substit.: the method's "
        "own target against softmax attention; approx.: the estimate against its target; total: what you get. FLOPs: "
        "share of exact attention's work (below 1 is less). Speed: time of torch's SDPA / time of the method through "
        "sparing.attention, median and quartiles of one run (above 1 is faster).\n"
        f"can: {letters}.\n"
        "+ compared with exact attention plus the value projection, whose work it samples.   * oracle: the best "
        "possible at its budget; needs the exact result, not deployable."
    )
