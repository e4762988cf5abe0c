"""The entry points that pyproject.toml declares, also where an older version is installed."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def declared(*, group: str) -> list[EntryPoint]:
    """Return the entry points of a group; takes the place of `importlib.metadata.entry_points`."""
    (body,) = re.findall(
        rf'^\[project\.entry-points\."{re.escape(group)}"\]\n(.*?)\n\n', _PYPROJECT.read_text(), re.M | re.S
    )
    return [EntryPoint(name, value, group) for name, value in re.findall(r'^([\w-]+) = "(.*)"$', body, re.M)]
