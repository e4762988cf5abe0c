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


def test_compare_by_layer(capsys):
    methods = "multipole(clusters=8, keys=8),top_keys(keys=8)"
    assert main(["compare", "--methods", methods, "--length", "64", "--documents", "1", "--layers"]) == 0
    lines = capsys.readouterr().out.partition("by layer")[2].splitlines()
    head, ours, bar, best = (next(x.split() for x in lines if word in x) for word in ("mean", "mult", "its", "top_"))
    assert head == ["method", *"012345", "mean"]
    assert len(ours) == len(best) + 1, "the spec of multipole has a blank"
    numbers = [float(x) for x in ours[-7:]]
    assert numbers[-1] == pytest.approx(sum(numbers[:6]) / 6, abs=1e-4)
    assert all(-1 <= float(x) <= 1 for x in bar[-7:])


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
