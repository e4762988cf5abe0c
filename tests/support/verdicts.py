"""Claims held against results that a test made up."""

from matplotlib.figure import Figure

from sparing_lab.studies import study

PAGE = 100  #: characters of a line in the terminal


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


def shown(name, rows, page=PAGE):
    """The tables, which must fit the page, and the figure that a study makes of the rows."""
    tables, figure = study(name).tables(rows), Figure()
    for table in tables:
        assert all(len(row) == len(table.columns) for row in table.rows), table.title
        widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
        assert sum(widths) + 2 * len(widths) <= page, table.title
    study(name).draw(rows, figure)
    return tables, figure
