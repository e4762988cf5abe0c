"""The one place where the commands print: text is text there, never markup and never a terminal's commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from sparing.progress import ProgressLines, reporting
from sparing.report.printable import printable


class Terminal(Console):
    """A console that shows every string as it is.

    Square brackets are not read as markup: style is given by `style=` or by `rich.text.Text`. Characters that a
    terminal would obey are shown as escapes (`printable`).
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; a table may be wider than the terminal: a line that wraps is better than a number that is cut off."""
        width = self.width
        self.width = max([width, *(least_width(each) for each in objects if isinstance(each, Table))])
        try:
            super().print(*objects, **options)
        finally:
            self.width = width

    def render_str(self, text: str, **options: Any) -> Text:
        """Turn a string into rich's text; also called to measure it, so that columns are as wide as what is shown."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is written, also of texts that did not come as a string."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def least_width(table: Table) -> int:
    """Return the width that a table needs for its columns that must not wrap; they keep it from then on."""
    wide = Terminal(width=1000)
    for column in table.columns:
        if column.no_wrap:
            column.min_width = max(wide.measure(cell).maximum for cell in (column.header, *column.cells))
    return wide.measure(table).minimum


@contextmanager
def progress(
    console: Terminal, first: str, *more: ProgressColumn, quiet: bool = False
) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar while a block runs; yield what takes its text, the steps that are done, and all steps.

    Where the console is no terminal, log lines are written instead, at most one in ten seconds. quiet: nothing is.
    """
    if quiet or not console.is_terminal:
        with reporting(False if quiet else ProgressLines(console.file)) as tell:
            yield tell
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), *more)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(first, total=None)
        yield lambda text, done, steps: bar.update(task, description=printable(text), completed=done, total=steps)
