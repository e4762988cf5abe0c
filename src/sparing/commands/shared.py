"""What several commands need."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def console_of() -> Any:
    """At least 100 columns wide: a number that is cut off is worse than a line that wraps."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        raise ModuleNotFoundError("rich is missing; run: pip install 'sparing[cli]'") from None
    return Console(width=max(100, Console().width))


def cache_folder() -> Path:
    """Where measurements are kept unless the user says otherwise."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "sparing" / "compare"
