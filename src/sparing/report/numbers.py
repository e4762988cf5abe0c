"""Format numbers and specs for people."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

NOT_FINITE = "not finite"


def finite(value: float | None) -> float | None:
    """Return the number, or None if it is not finite and cannot be drawn or sorted."""
    return value if value is not None and math.isfinite(value) else None


def percent(value: float) -> str:
    """Format a share as percent.

    >>> percent(0.00512), percent(-0.25), percent(123.0)
    ('0.51%', '-25%', '>1000%')
    """
    if not math.isfinite(value):
        return NOT_FINITE
    share = 100 * value
    if share > 1000:
        return ">1000%"
    return f"{share:.0f}%" if abs(share) >= 10 else f"{share:.2f}%" if abs(share) >= 0.01 else _small(share)


def _small(share: float) -> str:
    return "0%" if abs(share) < 5e-5 else f"{share:.4f}%"


def error(value: float) -> str:
    """Format a relative error.

    >>> error(0.03917), error(1e-7), error(12.345)
    ('0.0392', '0', '12.3')
    """
    if not math.isfinite(value):
        return NOT_FINITE
    return "0" if value < 5e-6 else f"{value:.4f}" if value < 10 else f"{value:.3g}"


def ratio(value: float | None) -> str:
    """Format a ratio; None stands for an infinite one, which JSON does not have.

    >>> ratio(1.234), ratio(0.0123), ratio(41.7)
    ('1.23x', '0.012x', '42x')
    """
    if value is None or not math.isfinite(value):
        return NOT_FINITE
    return f"{value:.2f}x" if 0.1 <= value < 10 else f"{value:.2g}x" if value < 0.1 else f"{value:.0f}x"


def megabytes(value: int) -> str:
    """Format bytes as megabytes of a million each.

    >>> megabytes(12_345_678)
    '12.3 MB'
    """
    return f"{value / 1e6:,.1f} MB"


def milliseconds(value: float) -> str:
    """Format seconds as milliseconds.

    >>> milliseconds(0.1594), milliseconds(0.00123)
    ('159 ms', '1.2 ms')
    """
    return f"{1000 * value:.0f} ms" if value >= 0.01 else f"{1000 * value:.1f} ms"


def seconds(value: float) -> str:
    """Format seconds.

    >>> seconds(12.345), seconds(0.0123)
    ('12.3 s', '0.01 s')
    """
    return f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"


def short_names(specs: Sequence[str]) -> dict[str, str]:
    """Shorten specs by the settings that all specs of a method share.

    >>> short_names(["window(size=8, sinks=1)", "window(size=64, sinks=1)", "lsh(rounds=4)"])
    {'window(size=8, sinks=1)': 'window size=8', 'window(size=64, sinks=1)': 'window size=64', 'lsh(rounds=4)': 'lsh'}
    """
    settings = {spec: _settings(spec) for spec in specs}
    short: dict[str, str] = {}
    for spec, (name, held) in settings.items():
        family = [other for same, other in settings.values() if same == name]
        telling = [each for each in held if not all(each in other for other in family)]
        short[spec] = f"{name} {', '.join(telling)}".strip()
    found = list(short.values())
    return {spec: name if found.count(name) == 1 else spec for spec, name in short.items()}


def _settings(spec: str) -> tuple[str, list[str]]:
    match = re.fullmatch(r"(\w+)\((.*)\)", spec)
    return (spec, []) if match is None else (match[1], match[2].split(", "))
