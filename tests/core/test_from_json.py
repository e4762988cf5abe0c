"""Results from a file: every wrong type is refused by the name of its part."""

import copy
import json

import pytest

from sparing.cli.main import main
from sparing.from_json import DEPTH, parse
from sparing.store import verify_checksum
from sparing.workbench.comparison.verdict import Comparison
from tests.support.comparisons import example

PLAIN = verify_checksum(json.loads(example().to_json()))  # as if written by hand: the parts are looked at
WRONG = (None, True, 10**400, "x", [], {})  # tests/fuzz tries many more


def parts(held, path=()):
    """The path of every value in a JSON, of lists the first."""
    yield path
    if isinstance(held, dict):
        for key, each in held.items():
            yield from parts(each, (*path, key))
    elif isinstance(held, list):
        for each in held[:1]:
            yield from parts(each, (*path, 0))


def with_part(path, value):
    if not path:
        return value
    held = copy.deepcopy(PLAIN)
    inside = held
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return held


@pytest.mark.parametrize("kind", sorted({path[0] for path in parts(PLAIN) if path}))
def test_a_value_of_a_wrong_type_is_named_or_shown(kind, tmp_path, capsys):
    """Whatever stands in one place, the report is printed, or one line says which part is wrong."""
    target = tmp_path / "found.json"
    for path in parts(PLAIN):
        if not path or path[0] != kind:
            continue
        for value in WRONG:
            target.write_text(json.dumps(with_part(path, value)))
            status = main(["show", str(target), "--layers"])
            err = capsys.readouterr().err
            assert status == 0 or (err.count("\n") == 1 and "Error:" not in err and "found.json" in err), (
                path,
                value,
                err,
            )
            if status and len(path) > 1:
                assert kind in err, (path, value, err)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("rows", 0, "change", "mean"), "x", r"rows\[0\].change.mean must be a number, not 'x'"),
        (("rows", 0, "time", "model"), [1, 2], r"rows\[0\].time.model must have 3 entries, not 2"),
        (("rows", 0, "verdict"), "fine", r"rows\[0\].verdict='fine' is not known"),
        (("rows", 0, "crossover"), 2**63, r"rows\[0\].crossover must be an integer below 2\^63"),
        (("rows", 0, "colour"), "x", r"rows\[0\] has 'colour', which is not known"),
        (("rows", 0, "layers", 0, "heads"), [], r"rows\[0\].layers: a layer has no heads"),
        (("rows", 0, "end"), {"cosine": "x"}, r"rows\[0\].end\['cosine'\] must be a number"),
        (("rows", 0), 3, r"rows\[0\] must be an object, not 3"),
        (("rows",), None, r"rows must be a list, not None"),
        (("maps", 0, "pixels"), "!", r"maps\[0\].pixels must be base64 of side x side bytes"),
        (("maps", 0, "side"), 10**9, r"maps\[0\].pixels must be base64 of side x side bytes"),
        (("model",), 3, r"model must be a text, not 3"),
        (("tolerance",), None, r"tolerance must be a number"),
    ],
)  # fmt: skip
def test_errors_name_the_part(path, value, message):
    with pytest.raises(ValueError, match=message):
        Comparison.from_json(json.dumps(with_part(path, value)))


def test_nesting_is_counted_without_recursion():
    assert parse("[" * DEPTH + "]" * DEPTH)
    for depth in (DEPTH + 1, 500, 10**6):
        with pytest.raises(ValueError, match="nested more than"):
            parse("[" * depth + "]" * depth)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "Expecting value at column 1"), ('{"a":\n x}', "Expecting value at line 2, column 2"), ("9" * 9999, "thousands of digits")],
)  # fmt: skip
def test_what_is_not_json_is_said_in_one_line(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)
