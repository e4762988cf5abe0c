"""Claims held against results that a test made up."""

from sparing_lab.studies import study


def verdict(name, key, rows):
    """What the study says to its claim, given these rows."""
    (claim,) = [claim for claim in study(name).claims if claim.key == key]
    return claim.judge(rows).verdict


def others(name, rows, wanted="reproduces"):
    """The claims with another verdict than that, given these rows."""
    said = {claim.key: claim.judge(rows).verdict for claim in study(name).claims}
    return {key: verdict for key, verdict in said.items() if verdict != wanted}


def changed(rows, where, **new):
    """The rows, with these entries in those that `where` picks."""
    assert any(where(row) for row in rows)
    return [{**row, **new} if where(row) else row for row in rows]
