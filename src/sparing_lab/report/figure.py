"""How all figures look, and how they become files."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, which people of all kinds of colour vision can tell apart; black stands for exact attention.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
PAPER: dict[str, Any] = {
    "linestyle": "none",
    "marker": "x",
    "color": "black",
    "markersize": 7,
    "zorder": 5,
}  #: its values


def style(number: int) -> dict[str, Any]:
    """Colour and marker of the curve of that number: nobody has to tell curves by their colour alone."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}


def panels(figure: Figure, rows: int, columns: int, *, size: tuple[float, float] = (5.0, 3.8)) -> Sequence[Any]:
    """Axes in a grid, row by row; size: of one, in inches."""
    figure.set_size_inches(size[0] * columns, size[1] * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    for each in axes.flat:
        each.grid(alpha=0.25, linewidth=0.6)
    return list(axes.flat)


def legend_below(figure: Figure, axes: Sequence[Any], columns: int, **options: Any) -> None:
    """One legend for all of these axes, each label once."""
    shown = {label: line for each in axes for line, label in zip(*each.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=columns, **options)


def need_matplotlib(extra: str = "study") -> None:
    """Raise where it is missing, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"matplotlib is missing; run: pip install 'sparing[{extra}]'", name="matplotlib"
        ) from None


def drawn(draw: Callable[[Figure], None], path: Path) -> bytes:
    """Return what `draw` puts into a figure, in the format of the file that it is for."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    look: Any = {"font.size": 9, "axes.titlesize": 10, "legend.fontsize": 8, "svg.hashsalt": path.stem}
    with rc_context(look):
        figure = Figure(figsize=(6, 4), layout="constrained")
        draw(figure)
        found = io.BytesIO()
        figure.savefig(found, format=path.suffix.lstrip("."), dpi=150)
    return found.getvalue()
