"""What all studies share: the command, resumption, the ledger."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from sparing.cli.main import main
from sparing.store import Store
from sparing_lab.report.study import ledger
from sparing_lab.studies import NAMES, study
from sparing_lab.studies.judges import Criterion, Judge, below
from sparing_lab.studies.run import run
from sparing_lab.studies.study import PAPERS, Claim, Settings, Study, findings
from sparing_lab.studies.tables import Table


def small(measure, **options):
    """A study of three numbers."""
    options = {"findings": {"flat": "It is not."}, **options}

    def draw(rows, figure):
        figure.subplots().plot([row["x"] for row in rows], [row["y"] for row in rows])

    def judge(words, holds, ours):
        return Judge(lambda rows: rows, Criterion(words, holds), shows=lambda rows: ours)

    claims = (
        Claim("rises", "table 1", "y rises", "1 to 3", judge=judge("each is larger", _rises, "so")),
        Claim("flat", "table 2", "y | is flat", "2", judge=judge("all are equal", lambda rows: False, "no")),
        Claim("far", "table 3", "x", "y", judge=Judge(lambda rows: [], below(1), needs="no data")),
        Claim("own", "none", "asked by us", "-", judge=judge("-", lambda rows: True, "yes"), ours=True),
    )
    return Study(
        name="small", title="Three numbers", paper="mca", where="table 1", draw=draw, claims=claims, measure=measure,
        cells=lambda settings: [{"x": x} for x in (1, 2, 3)],
        tables=lambda rows: [Table("numbers", ["x", "y"], [[str(row["x"]), str(row["y"])] for row in rows])], **options,
    )  # fmt: skip


def _rises(rows):
    return all(a["y"] < b["y"] for a, b in pairwise(rows))


def double(settings, cell):
    return {"y": 2 * cell["x"]}


@pytest.mark.parametrize("name", NAMES)
def test_a_study_says_what_it_is(name):
    found = study(name)
    assert found.name == name
    assert found.paper in PAPERS
    assert found.claims
    assert len({claim.key for claim in found.claims}) == len(found.claims)
    assert all(claim.states and claim.paper and claim.criterion and claim.where for claim in found.claims)
    assert set(found.options) <= {"data", "seeds", "model"}


def test_a_wrong_result_changes_the_verdict():
    assert run(small(double), Settings(), Store(None)).judgements["rises"].verdict == "reproduces"
    wrong = run(small(lambda settings, cell: {"y": -cell["x"]}), Settings(), Store(None))
    assert wrong.judgements["rises"].verdict == "does not"


def test_a_study_that_was_stopped_resumes_and_finds_the_same(tmp_path):
    done = []

    def stops(settings, cell):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(cell["x"])
        return double(settings, cell)

    with pytest.raises(KeyboardInterrupt):
        run(small(stops), Settings(), Store(tmp_path))
    again = []
    found = run(
        small(lambda settings, cell: again.append(cell["x"]) or double(settings, cell)), Settings(), Store(tmp_path)
    )
    assert (done, again) == ([1, 2], [3])
    assert found.rows == run(small(double), Settings(), Store(None)).rows


@pytest.mark.parametrize("change", [{"version": 2}, {"timed": True}])
def test_what_was_measured_differently_is_not_taken_for_the_same(tmp_path, change):
    run(small(double), Settings(), Store(tmp_path))
    again = []
    other = small(lambda settings, cell: again.append(cell["x"]) or double(settings, cell), **change)
    run(other, Settings(), Store(tmp_path))
    assert again == [1, 2, 3]


def test_the_ledger_has_a_row_for_each_claim_and_a_paragraph_for_what_does_not_hold():
    page = ledger([run(small(double), Settings(), Store(None))])
    assert "| y rises | table 1 | 1 to 3 | so | **reproduces** |" in page
    assert "| y \\| is flat | table 2 | 2 | no | **does not** |" in page
    assert "| x | table 3 | y | no data | **not run** |" in page
    assert "It is not." in page
    assert "`sparing study small`" in page
    assert "| our question |" in page
    assert "1 reproduces, 0 same shape, 1 does not, 1 not run. Questions of our own stand apart" in page


def test_paragraphs_are_about_usual_runs_only():
    outcome = run(small(double, options=("model",)), Settings(model="my-model"), Store(None))
    page = ledger([outcome])
    assert "It is not." not in page
    assert "all are equal" in page  # the criterion stands for any run
    assert "`sparing study small --model my-model`" in page


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("mca-glue", "glue/TASK/dev.tsv"), ("mca-tradeoff", "SST-2, dev.tsv"), ("mca-longformer", "imdb, hyperpartisan"),
        ("value-aware-oracles", "books/*.txt"), ("value-aware-mlm", "books/*.txt"),
        ("value-aware-kernels", "wikitext2/train.txt"), ("skyformer-spectral", "wikitext2/valid.txt"),
        ("skyformer-spectrum", "imdb/*.jsonl"), ("skyformer-lra", "film reviews"), ("skyformer-convergence", "film"),
        ("skyformer-instability", "film reviews"), ("yoso-pretraining", "*.txt"), ("yoso-glue", "glue/TASK/train.tsv"),
    ],
)  # fmt: skip
def test_a_folder_without_the_studys_data_is_refused_by_name(name, wanted, tmp_path):
    said = f"data: {tmp_path} holds nothing for this study, which looks for {wanted}"
    with pytest.raises(ValueError, match=re.escape(said)):
        study(name).cells(Settings(data=tmp_path))


def test_findings_are_about_claims_that_there_are():
    for paper in PAPERS:
        for name, found in findings(paper).items():
            assert study(name).paper == paper
            assert set(found) <= {claim.key for claim in study(name).claims}
            assert all(text.endswith(".") for text in found.values())
    assert study("mca-bounds").finding("rounding").startswith("The equation gives a real number")
    assert study("mca-bounds").finding("lemma") == ""


def test_the_command_prints_and_writes(tmp_path, capsys):
    assert main(["study", "value-aware-example", "--out", str(tmp_path / "out"), "--no-cache"]) == 0
    shown = capsys.readouterr().out
    assert "2.4925, 3.1925, 3.7925" in shown
    assert max(len(line) for line in shown.splitlines() if "wrote" not in line) <= 100
    held = json.loads((tmp_path / "out" / "value-aware-example.json").read_text())
    assert held["claims"][0]["verdict"] == "reproduces"
    assert (tmp_path / "out" / "value-aware-example.png").read_bytes().startswith(b"\x89PNG")


def test_the_judge_on_the_page_of_studies_does_what_the_page_says():
    page = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(code, {})


@pytest.mark.parametrize("name", NAMES)
def test_the_published_ledger_has_the_words_of_the_code(name):
    page = (Path(__file__).parents[2] / "docs" / "reproduction.md").read_text()
    (section,) = re.findall(rf"^### {name}\n(.*?)(?=^##|\Z)", page, re.S | re.M)
    for claim in study(name).claims:
        row = " | ".join(cell.replace("|", "\\|") for cell in (claim.states, claim.where, claim.paper))
        (verdict,) = re.findall(rf"^\| {re.escape(row)} \| .* \| \*\*(.*)\*\* \|$", section, re.M)
        if verdict in ("does not", "same shape"):
            said = f"*{claim.states[0].upper()}{claim.states[1:]}: {verdict}.*"
            finding = study(name).finding(claim.key)
            assert f'{said} "Reproduces" takes: {claim.criterion}.{finding and f" {finding}"}\n' in section


def test_the_list_names_every_study(capsys):
    assert main(["study", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["yoso-table9"], "there is none named 'yoso-table9'"),
        ([], "name a study, or ask for --all"),
        (["value-aware-example", "--scale", "large"], "scale='large' is not one of small, paper"),
        (["value-aware-example", "--data", "/nowhere"], "there is no folder /nowhere"),
        (["value-aware-example", "--model", "minilm"], "has no use for it"),
        (["value-aware-example", "--seeds", "0"], "seeds=0 must be at least 1"),
        (["value-aware-example", "--write-docs"], "--write-docs needs --all"),
        (["value-aware-example", "--out", "/dev/null"], "is a file"),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys):
    assert main(["study", *arguments, "--no-cache"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
