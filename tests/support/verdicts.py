"""Claims held against results that a test made up."""

from sparing_lab.studies import study


def verdict(name, key, rows):
    """What the study says to its claim, given these rows."""
    (claim,) = [claim for claim in study(name).claims if claim.key == key]
    return claim.judge(rows).verdict


def changed(rows, where, **new):
    """The rows, with these entries in those that `where` picks."""
    assert any(where(row) for row in rows)
    return [{**row, **new} if where(row) else row for row in rows]
