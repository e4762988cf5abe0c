"""Say in one sentence what a comparison of documents or prompts found."""

from __future__ import annotations

from collections.abc import Sequence

from sparing.workbench.comparison.headline import fastest, is_exact
from sparing.workbench.comparison.judgement import FASTER, SLOWER, UNKNOWN, UNSAFE, UNTIMED, is_faster
from sparing.workbench.comparison.seconds import PaddingSeconds
from sparing.workbench.comparison.verdict import Row


def summary(rows: Sequence[Row], documents: int, tokens: int, tolerance: float, metric: str) -> str:
    """Return what to do, in one sentence."""
    on = f"On {documents} document{'s' * (documents != 1)} of up to {tokens} tokens"
    within = f"within {percentage(tolerance)} ({metric})"
    best = fastest(rows)
    if best is not None:
        assert best.change is not None
        assert best.speed is not None
        if is_exact(best):
            return f"{on}, {_exact_wins(best, rows, within)}"
        return (
            f"{on}, {best.method} is {best.speed.median:.2f}x as fast as the exact model here, and {within}: "
            f"{best.change.mean:.2%} on average."
        )
    judged = (SLOWER, UNTIMED, UNKNOWN, UNSAFE)
    tried = [row for row in rows if row.verdict in judged and not is_exact(row)]
    safe = [row for row in tried if row.verdict == SLOWER]
    busy = next((row for row in rows if row.verdict == UNTIMED and is_exact(row)), None)
    if not tried and busy is not None:
        return (
            f"{on} this machine is too busy to time sparing's exact attention: {busy.disturbed}. Measure again when it "
            "is idle."
        )
    if not tried:
        return f"{on} keep exact attention: nothing that could replace it was measured."
    unknown = [row for row in tried if row.verdict == UNKNOWN]
    untimed = [row for row in tried if row.verdict == UNTIMED]
    if untimed:
        return (
            f"{on} {_stay(len(untimed) + len(safe), len(tried))} {within}, but this machine is too busy to time them: "
            f"{untimed[0].disturbed}. Measure again when it is idle."
        )
    if may_pay := [row for row in unknown if is_faster(row.speed, row.disturbed)]:
        best = min(may_pay, key=_mildest)
        assert best.speed is not None
        known = f"{_stay(len(safe), len(tried))} within it, and none of these is faster" if safe else "none is known to"
        return (
            f"{on} one cannot tell yet whether {best.method}, {best.speed.median:.2f}x as fast as the exact model "
            f"here, stays {within}: {best.reason}. Until then keep exact attention: {known}."
        )
    if safe:
        return (
            f"{on} keep exact attention: {_stay(len(safe), len(tried))} {within}, but none is faster here."
            f"{_later(safe, tokens)}"
        )
    if unknown:
        best = min(unknown, key=_mildest)
        slower = "" if best.disturbed else ", and none that may is faster here"
        return f"{on} keep exact attention: no setting is known to stay {within}{slower}. {best.method}: {best.reason}."
    kept = " and keeps the facts of its context" if any(row.facts is not None for row in tried) else ""
    return f"{on} keep exact attention: no setting stays {within}{kept}."


def _exact_wins(best: Row, rows: Sequence[Row], within: str) -> str:
    """Say that sparing's exact attention is faster than the model's own, and that no approximation is by more."""
    assert best.speed is not None
    tried = [row for row in rows if row.verdict in (FASTER, SLOWER, UNKNOWN, UNSAFE) and not is_exact(row)]
    safe = [row for row in tried if row.verdict in (FASTER, SLOWER)]
    stay = f"{_stay(len(safe), len(tried))} {within}, and none" if safe else f"no setting is known to stay {within} and"
    more = f" Of the approximations, {stay} is faster than that." if tried else ""
    return (
        f"sparing's exact attention is {best.speed.median:.2f}x as fast as the model's own here, with the same results "
        f"but for rounding.{more}"
    )


def padding_sentence(found: PaddingSeconds | None, batch: int, padding: float) -> str:
    """Say what a batch gains without padding; "" where it gains nothing."""
    if found is None or not is_faster(found.speed, found.disturbed):
        return ""
    return (
        f"A batch of {batch} ({padding:.0%} padding) is {found.speed.median:.2f}x as fast without its padding, with "
        'the same outputs: sparing.approximate(model, "exact", padding="remove").'
    )


def _stay(count: int, tried: int) -> str:
    return f"{count} of {tried} setting{'s' * (tried != 1)} {'stay' if count != 1 else 'stays'}"


def _mildest(row: Row) -> float:
    return abs(row.change.mean) if row.change else 0.0


def _later(safe: Sequence[Row], tokens: int) -> str:
    """Say at which length to measure again, if attention alone of a safe setting is faster from there on.

    How much it changes so long a document is not known: errors grow with the length.
    """
    pays = [row for row in safe if row.crossover is not None and row.crossover > tokens]
    if not pays:
        return ""
    best = min(pays, key=lambda row: row.crossover or 0)
    assert best.crossover is not None
    return (
        f" Longer documents may pay: the attention of {best.method} is faster from about {rounded(best.crossover)} "
        "tokens on, and what it changes there was not measured (--length)."
    )


def percentage(share: float) -> str:
    """Format a tolerance, which is never 0.

    >>> percentage(0.01), percentage(2e-6)
    ('1.00%', '0.0002%')
    """
    return f"{share:.2%}" if share >= 1e-4 else f"{100 * share:.2g}%"


def rounded(tokens: int) -> str:
    """Format a crossover with two digits: it is no more precise.

    >>> rounded(2874)
    '2,900'
    """
    digits = max(len(str(tokens)) - 2, 0)
    return f"{round(tokens, -digits):,}"
