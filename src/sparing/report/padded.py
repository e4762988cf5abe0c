"""Print a benchmark of padded batches."""

from __future__ import annotations

from rich import box
from rich.table import Table

from sparing.report.numbers import percent
from sparing.report.terminal import Terminal
from sparing.workbench.benchmark.padded import ORDERS, PACKED, SAME, PaddedBench


def show(bench: PaddedBench, *, console: Terminal) -> None:
    """Print what is fastest, and a row for each side."""
    console.print(
        f"{bench.model} on {bench.data}: {bench.texts} texts of {bench.tokens / bench.texts:.0f} tokens on average, "
        f"in batches of {bench.batch_size}; {bench.machine.get('cpu')}, {bench.machine.get('threads')} threads"
    )
    if bench.disturbed:
        console.print(
            f"This machine was busy: {bench.disturbed}. Trust no time below; run it again.", style="bold yellow"
        )
    exact = bench.difference <= SAME
    if not exact:
        console.print(
            f"Without padding, embeddings differ by {bench.difference:.2g} at most, which is not rounding: no speed is "
            "given. Please report it.",
            style="bold red",
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    for title in ("texts", "padding", "side", "tokens / s", "speed", "change"):
        table.add_column(title, justify="left" if title in ("texts", "side") else "right")
    for order in ORDERS:
        for row in (row for row in bench.batches if row.order == order):
            table.add_row(
                order, percent(bench.padding.get(order, 0.0)), row.side, f"{bench.tokens / row.seconds.median:,.0f}",
                f"{row.speed.median:.2f}x ({row.speed.low:.2f} to {row.speed.high:.2f})" if exact else "?",
                percent(row.change),
            )  # fmt: skip
    table.caption = (
        "Texts: in the order in which they come, or sorted by length, as sentence-transformers sorts them. Padding: "
        "share of the positions. Tokens: valid ones. Speed: time of the padded exact model / time of this side, with "
        "quartiles. Change: 1 - cosine of the embedding, mean over texts."
    )
    console.print(table)
    best = max(bench.batches, key=lambda row: row.speed.median)
    if exact and not bench.disturbed and best.side == PACKED and best.speed.low > 1:
        console.print('Turn it on: sparing.approximate(model, "exact", padding="remove")', style="bold")
