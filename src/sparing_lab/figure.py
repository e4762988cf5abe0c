"""The look of all figures, what studies draw in them, and how they become files."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure
else:
    Figure = Any  # matplotlib is an extra; only `drawn` imports it

#: Okabe and Ito's palette, which is safe for colour-blind readers; black stands for exact attention.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
PAPER: dict[str, Any] = {
    "linestyle": "none",
    "marker": "x",
    "color": "black",
    "markersize": 7,
    "zorder": 5,
}  #: the look of the paper's values


def style(number: int) -> dict[str, Any]:
    """Return colour and marker of the curve of that number, so that curves differ by more than their colour."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}


def panels(figure: Figure, rows: int, columns: int, *, size: tuple[float, float] = (5.0, 3.8)) -> Sequence[Any]:
    """Return axes in a grid, row by row; size: that of one, in inches."""
    figure.set_size_inches(size[0] * columns, size[1] * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    for each in axes.flat:
        each.grid(alpha=0.25, linewidth=0.6)
    return list(axes.flat)


def line(
    axes: Any, curve: Mapping[Any, float], label: str | None = None, number: int | None = None, **look: Any
) -> None:
    """Draw a curve, y by x; number: that of its style, which `look` overrides."""
    own = {} if number is None else style(number)
    axes.plot(list(curve), list(curve.values()), label=label, **{**own, **look})


def log_ticks(axes: Any, values: Sequence[float]) -> None:
    """Make the x axis logarithmic, with a mark at each of these values and nowhere else."""
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def log_marks(axes: Any, values: Sequence[float]) -> None:
    """Make the y axis logarithmic, with a mark at each of these values that it shows and nowhere else."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    shown = [value for value in values if low <= value <= high]
    axes.set_yticks(shown, [f"{value:g}" for value in shown])
    axes.minorticks_off()


def level(axes: Any, value: float, **look: Any) -> None:
    """Draw a thin horizontal line, black unless told otherwise."""
    axes.axhline(value, **{"color": "black", "linewidth": 0.8, **look})


def legends(axes: Sequence[Any], columns: int = 2, below: float = 0.14, **options: Any) -> None:
    """Put a legend below each of these axes."""
    for each in axes:
        each.legend(loc="upper center", bbox_to_anchor=(0.5, -below), ncols=columns, **options)


def legend_below(figure: Figure, axes: Sequence[Any], columns: int, **options: Any) -> None:
    """Put one legend for all of these axes below the figure, each label once."""
    shown = {label: line for each in axes for line, label in zip(*each.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=columns, **options)


def need_matplotlib(extra: str = "study") -> None:
    """Raise if matplotlib is missing, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"matplotlib is missing; run: pip install 'sparing[{extra}]'", name="matplotlib"
        ) from None


def drawn(draw: Callable[[Figure], None], path: Path) -> bytes:
    """Return what `draw` puts into a figure, in the format of the file that it is for."""
    from matplotlib import figure as matplotlib_figure
    from matplotlib import rc_context

    look: Any = {"font.size": 9, "axes.titlesize": 10, "legend.fontsize": 8, "svg.hashsalt": path.stem}
    with rc_context(look):
        figure = matplotlib_figure.Figure(figsize=(6, 4), layout="constrained")
        draw(figure)
        found = io.BytesIO()
        figure.savefig(found, format=path.suffix.lstrip("."), dpi=150)
    return found.getvalue()
