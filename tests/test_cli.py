"""The command as a user meets it."""

import pytest

from sparing.cli import main


def test_compare_prints_a_readable_table(capsys):
    assert main(["compare", "--methods", "exact,nystrom(landmarks=8),top_keys(keys=8)", "--length", "64"]) == 0
    out = capsys.readouterr().out
    assert "6 layers, 2 documents of 64 tokens" in out
    for word in (
        "nystrom(landmarks=8)",
        "top_keys(keys=8) *",
        "total",
        "FLOPs",
        "speed",
        "CPMXQGT",
        ".P.XQGT",
        "oracle",
    ):
        assert word in out, f"{word!r} is missing in\n{out}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "nystrm"], "unknown name 'nystrm'"),
        (["--methods", ","], "names no method"),
        (["--methods", "nystrom(landmarks=0)"], "landmarks=0"),
        (["--length", "4096"], "--length=4096"),
        (["--documents", "0"], "--documents=0"),
    ],
)
def test_mistakes_give_one_line_and_status_2(arguments, words, capsys):
    assert main(["compare", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_help_names_the_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "compare" in capsys.readouterr().out
