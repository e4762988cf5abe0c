"""The benchmark: what it refuses, what it leaves out, what it concludes. No test asserts a speed."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import sparing
from sparing.cli.main import main
from sparing.contract import _REGISTRY
from sparing.methods.exact import Exact
from sparing.report.bench import head, notes, show
from sparing.report.bench_files import read_json, write
from sparing.report.bench_plot import figure, plot
from sparing.report.terminal import Terminal
from sparing.workbench import memory
from sparing.workbench.benchmark import bench as benchmark
from sparing.workbench.benchmark import facts, gate, peers, results
from sparing.workbench.benchmark.bench import bench, extend, rounds_for
from sparing.workbench.benchmark.results import (
    SDPA,
    SDPA_BF16,
    SDPA_PROJECTION,
    Bench,
    BenchSettings,
    Fact,
    PeerStatus,
    Ratio,
    Timing,
)
from sparing.workbench.benchmark.workload import clustered, keys_used, learned_state, method_work
from sparing.workbench.timing import Interval, interval, race

TINY = {"lengths": (32, 64), "heads": 2, "width": 8, "threads": 1, "seconds": 600.0}


class OffByALittle(Exact):
    """Its fast path is wrong by a thousandth."""

    name = "_off_by_a_little"
    __doc__ = Exact.__doc__

    def fast(self, q, k, v, call):
        return self.reference(q, k, v, call) * 1.001


class WrongGradient(Exact):
    """Its fast path has the right output, and no gradient through the keys."""

    name = "_wrong_gradient"
    __doc__ = Exact.__doc__

    def fast(self, q, k, v, call):
        return self.reference(q, k.detach() + 0 * k, v, call)


class NotANumber(Exact):
    name = "_not_a_number"
    __doc__ = Exact.__doc__

    def fast(self, q, k, v, call):
        out = self.reference(q, k, v, call).clone()
        out[..., 0, 0] = torch.nan
        return out


@pytest.fixture
def broken(monkeypatch):
    for method in (OffByALittle, WrongGradient, NotANumber):
        monkeypatch.setitem(_REGISTRY, method.name, method)


@pytest.fixture(scope="module")
def run():
    """A small run of three methods, one of them on a projection."""
    small = partial(facts.encode_fact, tokens=16, features=24, heads=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "encode_fact", small)
        return bench(BenchSettings(methods=("nystrom(landmarks=8)", "monte_carlo", "yoso(hashes=2)"), **TINY))


def printed(found, capsys, *, targets=False):
    show(found, targets=targets)
    return capsys.readouterr().out


def test_a_run_measures_every_side_and_states_every_ratio(run):
    specs = run.settings.methods
    assert specs == ("nystrom(landmarks=8)", "monte_carlo(alpha=0.2)", "yoso(hashes=2)")
    assert {t.side for t in run.timings} == {SDPA, SDPA_BF16, SDPA_PROJECTION, *specs}
    assert len(run.timings) == 6 * 2 * 2
    for timing in run.timings:
        assert timing.seconds.low <= timing.seconds.median <= timing.seconds.high
        assert 2 <= timing.rounds <= 9
        assert (timing.memory is None) != memory.can_measure()
    against = {(r.method, r.against) for r in run.ratios}
    assert against == {
        *((spec, exact) for spec in (specs[0], specs[2]) for exact in (SDPA, SDPA_BF16)),
        (specs[1], SDPA_PROJECTION),
    }
    assert [g.passed for g in run.gates] == [True] * 3
    assert run.machine["threads"] == 1
    assert run.machine["torch"] == torch.__version__
    assert "clustered" in run.inputs
    assert [fact.value is None for fact in run.facts] == [False, *[not memory.can_measure()] * 2, False, False]


def test_the_number_of_threads_is_restored(monkeypatch):
    monkeypatch.setattr(benchmark._Track, "run", lambda *args: None)
    before = torch.get_num_threads()
    wanted = BenchSettings(methods=("kernel(kind=elu)",), **{**TINY, "lengths": (8,), "threads": before + 1})
    assert bench(wanted).machine["threads"] == before + 1
    assert torch.get_num_threads() == before


def test_methods_run_in_the_type_that_is_asked_for(run):
    wanted = BenchSettings(methods=("window(size=8)",), **TINY, dtype="bfloat16")
    passed = gate.Gate(method="window(size=8)", passed=True, length=16, excess=0.0, detail="")
    (side,) = (x for x in benchmark._sides([sparing.method("window(size=8)")], [passed], wanted) if x.method)
    assert {x.dtype for x in side.build(clustered(1, 2, 16, 8)).leaves} == {torch.bfloat16}
    changed = replace(run, settings=wanted)
    assert "2 heads x 8, bfloat16, 1 threads" in head(changed)
    sizes = {**results.TARGET_SIZES, "lengths": (4096,), "methods": (results.TARGETS[0].method,)}
    assert replace(run, settings=BenchSettings(**sizes)).targets()
    assert not replace(run, settings=BenchSettings(**sizes, dtype="bfloat16")).targets(), "they are for float32"
    with pytest.raises(ValueError, match="dtype='int8' is not one of float32, bfloat16, float16"):
        replace(wanted, dtype="int8")


def test_tables_hold_ratios_times_and_crossovers(run, capsys):
    out = printed(run, capsys)
    for word in ("nystrom(landmarks=8)", "monte_carlo(alpha=0.2) +", "bf16 ", "crossover", "forward+backward", "KiB"):
        assert word in out, f"{word!r} is missing in\n{out}"
    assert "target" not in out, "targets are for developers"
    assert "this run can judge none" in printed(run, capsys, targets=True)
    assert "Every method agrees with its reference, at 64 tokens" in out
    ratio = run.ratio("nystrom(landmarks=8)", SDPA, 64, "forward")
    assert f"{ratio.speed.median:.2f}x" in out


def test_json_gives_back_an_equal_run(run, tmp_path):
    path = tmp_path / "new" / "bench.json"
    write(run, path, path.with_suffix(".png"))
    assert read_json(path) == run
    data = json.loads(path.read_text())
    assert data["format"] == 1
    assert data["settings"]["lengths"] == [32, 64]
    assert set(data["timings"][0]["seconds"]) == {"median", "low", "high"}
    assert data["crossovers"]["forward"]["nystrom(landmarks=8)"]["kind"] in ("at", "below", "none")
    with pytest.raises(ValueError, match="format=2"):
        Bench.from_dict({**data, "format": 2})
    path.write_text(json.dumps({**data, "duration": data["duration"] + 1}))
    with pytest.raises(ValueError, match=r"bench\.json: the checksum does not match"):
        read_json(path)


def test_the_plot_shows_speed_over_the_length_with_ticks_and_names_that_read(run):
    pytest.importorskip("matplotlib.figure")
    lengths, specs = (512, 1024, 65536), ("nystrom(landmarks=8)", "window(size=8)")
    ratios = [
        Ratio(method=spec, against=SDPA, length=n, part="forward", speed=Interval(x, 0.9 * x, 1.1 * x))
        for spec in specs
        for n, x in zip(lengths, (0.5, 2.0, 80.0), strict=True)
    ]
    settings = replace(run.settings, methods=specs, lengths=lengths, backward=False)
    (axes,) = figure(replace(run, settings=settings, ratios=ratios, timings=[])).axes
    assert axes.get_ylabel() == "times as fast as exact attention"
    assert [each.get_text() for each in axes.get_xticklabels()] == ["512", "1k", "64k"]
    assert [each.get_text() for each in axes.get_yticklabels()] == [
        "0.5x",
        "1x",
        "2x",
        "5x",
        "10x",
        "20x",
        "50x",
        "100x",
    ]
    assert [list(line.get_ydata()) for line in axes.lines[:2]] == [[0.5, 2.0, 80.0]] * 2
    names = {each.get_text(): each.xyann[1] for each in axes.texts}
    assert set(names) == {"nystrom", "window"}
    assert abs(names["nystrom"] - names["window"]) > 0.03, "two lines that end in one place"


def test_a_table_that_is_too_wide_is_split_by_length(run, capsys):
    settings = replace(run.settings, lengths=tuple(2**n for n in range(9, 17)))
    for width in (80, 100, 200):
        show(replace(run, settings=settings), console=Terminal(width=width))
        out = capsys.readouterr().out
        table = [line for line in out.splitlines() if "crossover" in line or line.startswith("nystrom")]
        assert max(map(len, table)) <= width
        assert all(f" {length}" in out for length in settings.lengths)
        assert out.count("Crossover: from there on") == len(settings.passes), "each is explained once"


def test_figures_and_plot_are_both_written_or_none(run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib.figure")
    assert len(plot(run, "svg")) > 5000
    files = [tmp_path / name for name in ("bench.json", "bench.png")]
    assert write(run, *files) == (files, "")
    assert files[1].stat().st_size > 5000

    def fails(source, target):
        raise OSError(28, "disk full")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="disk full"):
        write(run, tmp_path / "other.json", tmp_path / "other.png")
    assert sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("_off_by_a_little", "times what is allowed"),
        ("_wrong_gradient", "the error of the gradient 1"),
        ("_not_a_number", "inf times"),
    ],
)
def test_a_method_that_differs_from_its_reference_gets_no_ratio(spec, words, broken, capsys):
    found = bench(BenchSettings(methods=(spec, "exact"), **{**TINY, "lengths": (32,)}))
    bad, good = found.gates
    assert (bad.passed, good.passed) == (False, True)
    assert words in bad.detail
    assert {r.method for r in found.ratios} == {"exact"}
    assert all(t.seconds is None for t in found.timings if t.side == spec)
    out = printed(found, capsys)
    row = next(line for line in out.splitlines() if line.strip().startswith(spec))
    assert "red" in row
    assert "x" not in row.replace(spec, "")
    assert f"RED: {spec}" in out
    assert read_back(found) == found, "an infinite error has a place in JSON"


def read_back(found):
    return Bench.from_dict(json.loads(json.dumps(found.as_dict(), allow_nan=False)))


def test_a_wrong_gradient_does_not_matter_where_none_is_timed(broken):
    found = gate.check(sparing.method("_wrong_gradient"), clustered(1, 2, 33, 8), backward=False)
    assert found.passed


def test_a_method_that_raises_is_red(monkeypatch):
    def fails(self, q, k, v, call):
        raise RuntimeError("no such bucket\nat line 3")

    monkeypatch.setattr(Exact, "fast", fails)
    found = gate.check(sparing.method("exact"), clustered(1, 2, 33, 8), backward=True)
    assert not found.passed
    assert found.detail == "raised: no such bucket"


def test_learned_state_is_part_of_the_comparison_and_of_the_backward_pass():
    method, inputs = sparing.method("linformer(rank=4)"), clustered(1, 2, 33, 8)
    state = learned_state(method, inputs)
    assert torch.equal(state.weight, learned_state(method, inputs).weight)
    gradients = method_work(method, inputs, state=state).call(backward=True)()
    assert gradients[-1].shape == state.weight.shape
    assert gate.check(method, inputs, backward=True).passed


def test_inputs_are_peaked():
    inputs = clustered(1, 2, 512, 32)
    assert keys_used(inputs) < 512 / 4
    assert torch.equal(inputs.q, clustered(1, 2, 512, 32).q)


def test_what_takes_too_long_is_left_out_and_said(capsys, monkeypatch):
    """A clock by which SDPA takes n^2 / 1000 seconds and everything else one thousandth of a second."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    exact = benchmark.sdpa_work

    def slow(inputs, dtype):
        work = exact(inputs, dtype)

        def compute(*leaves):
            now[0] += leaves[0].shape[-2] ** 2 / 1000
            return work.compute(*leaves)

        return work._replace(compute=compute)

    monkeypatch.setattr(benchmark, "sdpa_work", slow)
    monkeypatch.setattr(benchmark, "method_work", lambda *a, **k: ticking(method_work(*a, **k), now))
    wanted = BenchSettings(
        methods=("kernel(kind=elu)",), **{**TINY, "lengths": (16, 32, 64, 128), "backward": False, "seconds": 5.0}
    )
    found = bench(wanted)
    measured = [t.length for t in found.timings if t.side == SDPA and t.seconds]
    assert measured == [16, 32], "64 tokens take 4 s: two rounds exceed 5 s"
    assert [found.timing(SDPA, n, "forward").rounds for n in measured] == [4, 3]
    assert "about 16 s" in found.timing(SDPA, 128, "forward").why
    assert all(found.timing("kernel(kind='elu')", n, "forward").seconds for n in wanted.lengths)
    assert {r.length for r in found.ratios} == {16, 32}, "no ratio without SDPA in the same run"
    assert found.ratio("kernel(kind='elu')", SDPA, 32, "forward").speed.median == pytest.approx(1024)
    assert "not measured: SDPA float32, forward, 128 tokens: about 16 s a call" in notes(found)


def test_a_linear_method_is_not_left_out_as_if_it_were_quadratic():
    side = benchmark._Side(name="-", build=None, method=sparing.method("kernel(kind=elu)"))
    side.seconds["forward"] = [(512, 1.0)]
    assert side.expected(8192, "forward", BenchSettings(methods=("exact",))) == pytest.approx(16.0)
    side.method = sparing.method("exact")
    assert side.expected(8192, "forward", BenchSettings(methods=("exact",))) == pytest.approx(256.0)


def ticking(work, now):
    def compute(*leaves):
        now[0] += 0.001
        return work.compute(*leaves)

    return work._replace(compute=compute)


def test_what_needs_too_much_memory_is_left_out(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    found = bench(BenchSettings(methods=("kernel(kind=elu)",), **{**TINY, "backward": False}))
    assert "GiB are free" in found.timing("kernel(kind='elu')", 32, "forward").why


def test_extending_to_a_longer_sequence():
    assert extend([], 64) is None
    assert extend([(16, 2.0)], 64) == 32.0, "one length: quadratic"
    assert extend([(16, 2.0)], 64, power=1.0) == 8.0, "one length and a known power"
    assert extend([(8, 1.0), (16, 2.0)], 64) == 8.0
    assert extend([(8, 2.0), (16, 1.0)], 64) == 4.0, "never sublinear"
    assert extend([(8, 1.0), (16, 100.0)], 64) == 1600.0, "never above quadratic"
    assert extend([(8, 0.0), (16, 1.0)], 32) == 4.0


def test_rounds_fit_the_budget():
    for seconds in (1e-6, 0.1, 1.0, 7.0, 19.0, 29.0, 31.0, 500.0):
        rounds = rounds_for(seconds, 60.0)
        assert rounds == 0 or (2 <= rounds <= 9 and rounds * seconds <= 60)
        assert (rounds == 0) == (2 * seconds > 60)


def made_up(ratio):
    """The first targets of yoso, with one ratio at every length but the longest."""
    settings = BenchSettings(methods=("yoso(hashes=32)",), lengths=(512, 1024, 4096, 16384), threads=2, backward=False)
    speed = Interval(ratio, ratio, ratio)
    return Bench(
        settings=settings,
        machine={"cpu": "a", "cores": 2, "instruction_set": None, "torch": "2"},
        inputs="none",
        ratios=[
            Ratio(method="yoso(hashes=32)", against=SDPA, length=n, part="forward", speed=speed)
            for n in (512, 1024, 4096)
        ],
        timings=[Timing(side=SDPA, length=16384, part="forward", why="about 100 s a call")],
    )


def test_targets_are_judged(capsys):
    assert not {"target", "met", "SHORT"} & set(printed(made_up(3.0), capsys).split())
    out = printed(made_up(3.0), capsys, targets=True)
    assert "2 of 4 targets met" in out
    assert "short of its target: yoso(hashes=32) forward at 4096: 3x, target 7x" in out
    assert "target not measured: yoso(hashes=32) forward at 16384: >=25x" in out
    for word in (">=1.2 met", ">=7 SHORT", ">=25 not run"):
        assert word in out


def test_targets_name_the_default_methods():
    specs = [str(sparing.method(spec)) for spec in benchmark.METHODS]
    assert tuple(specs) == benchmark.METHODS, "targets are found by the method's own spelling"
    assert {target.method for target in results.TARGETS} < set(specs)


MEMORY = """
import torch
from sparing.workbench import memory

size = 40 * 2**20
for _ in range(2):
    found = memory.peak_extra_bytes(lambda: torch.ones(size // 4).sum())
    assert size * 0.95 <= found <= size * 1.2, found
small = memory.peak_extra_bytes(lambda: [torch.ones(2**16) for _ in range(40)])  # 10 MiB of small blocks
assert 9 * 2**20 <= small <= 14 * 2**20, small
assert memory.peak_extra_bytes(lambda: None) < 2**20
assert memory.available_bytes() > 2**20
"""


def test_memory_of_a_call_counts_what_torch_takes_and_what_it_gave_back_before():
    """In a process of its own: small blocks come from what earlier tests left of the heap, and take nothing new."""
    if not memory.can_measure():
        pytest.skip("this system keeps no peak that can be reset")
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_says_when_it_cannot_tell(monkeypatch):
    monkeypatch.setattr(memory, "_RESET", Path("/nonexistent/clear_refs"))
    assert memory.peak_extra_bytes(lambda: pytest.fail("must not run")) is None


def test_a_race_alternates_and_lets_slow_sides_stop():
    order = []
    taken = race([lambda: order.append("a"), lambda: order.append("b")], (3, 1), (2, 1))
    assert [len(t) for t in taken] == [3, 1]
    assert order == ["b", "a", "a", "a", "a", "a", "a"]
    assert interval([3.0]) == (3.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="empty"):
        interval([])


def test_the_sampled_projection_is_compared_before_it_is_timed():
    sizes = {"tokens": 16, "features": 24, "heads": 2}
    for shared in (False, True):
        assert facts.encode_fact(shared, **sizes).value.median > 0
        wrong = facts.encode_fact(shared, lambda *args: facts.encode(*args) * 1.01, **sizes)
        assert wrong.value is None
        assert "differs from its reference" in wrong.why


def test_figures_beside_the_table_are_held_to_their_targets(run, capsys):
    known = Interval(median=1.5, low=1.4, high=1.6)
    held = [
        Fact(name="growth", value=known, at_most=1.5),
        Fact(name="gain", value=known, at_least=1.51),
        Fact(name="lost", value=None, why="no clock", at_least=1.0),
    ]
    assert [fact.met for fact in held] == [True, False, None]
    out = printed(replace(run, facts=held), capsys, targets=True)
    assert "growth: 1.50 (1.40-1.60; <=1.5 met)" in out, "no x: less is better"
    assert "gain: 1.50x (1.40-1.60; >=1.51 SHORT)" in out
    assert "lost: no clock" in out


def test_the_fastest_public_implementation_is_the_one_that_counts(run, capsys):
    spec = run.settings.methods[0]
    settings = replace(run.settings, lengths=(4096,))
    rivals = [PeerStatus(peer=name, method=spec, version="1") for name in ("slow", "quick")]
    ratios = [
        Ratio(method=spec, against=f"{name} for {spec}", length=4096, part="forward", speed=Interval(x, x, x))
        for name, x in (("slow", 9.0), ("quick", 2.9))
    ]
    out = printed(replace(run, settings=settings, peers=rivals, ratios=ratios, timings=[]), capsys, targets=True)
    assert f"2.90x against quick for {spec}, forward, 4096 tokens (>=3 SHORT)" in " ".join(out.split())


@pytest.mark.parametrize(
    ("spec", "peer", "tolerance"),
    [
        ("nystrom(landmarks=8, iterations=6)", "transformers Nystromformer", 0.1),  # it starts from one norm for all
        ("window(size=16)", "transformers Longformer", 1e-5),
        ("lsh(rounds=2, chunk=16)", "transformers Reformer", None),  # other rotations, and its keys are its queries
    ],
)
def test_public_implementations_compute_on_the_given_inputs(spec, peer, tolerance):
    pytest.importorskip("transformers")
    method, inputs = sparing.method(spec), clustered(2, 2, 128, 8)
    (found,) = [p for p in peers.peers_of(method) if p.name == peer]
    work = found.build(method, inputs)
    before = [x.clone() for x in work.leaves]
    with torch.no_grad():
        out = work.compute(*work.leaves).unflatten(-1, (2, -1)).transpose(1, 2)  # [B, n, H d] -> [B, H, n, d]
    assert all(torch.equal(a, b) for a, b in zip(before, work.leaves)), "it changed its inputs"
    assert out.shape == inputs.v.shape
    assert all(g.abs().sum() > 0 for g in work.call(backward=True)())
    if tolerance is not None:
        wanted = sparing.attention(inputs.q, inputs.k, inputs.v, method=method)
        assert (out - wanted).norm() / wanted.norm() < tolerance
    with pytest.raises(peers.CannotRun, match="multiple of"):
        found.build(method, clustered(1, 2, 33, 8))


def test_public_implementations_that_are_not_installed_are_named(capsys, monkeypatch):
    monkeypatch.setattr(peers.Peer, "version", lambda self: None)
    found = bench(
        BenchSettings(methods=("linformer(rank=4)", "kernel(kind=elu)"), peers=True, **{**TINY, "backward": False})
    )
    assert {(p.peer, p.version) for p in found.peers} == {("linformer", None), ("-", None)}
    out = printed(found, capsys)
    assert "linformer for linformer(rank=4): not installed; run: pip install 'linformer'" in out
    assert "no public implementation for CPUs known here: kernel(kind='elu')" in out


def test_an_implementation_that_fails_does_not_stop_the_others(monkeypatch):
    def fails(method, inputs):
        raise ImportError("built for another torch")

    mine = peers.Peer("theirs", "torch", lambda method: True, fails)
    monkeypatch.setattr(peers, "PEERS", (mine,))
    found = bench(BenchSettings(methods=("kernel(kind=elu)",), peers=True, **{**TINY, "backward": False}))
    assert "ImportError: built for another torch" in found.timing("theirs for kernel(kind='elu')", 32, "forward").why
    assert found.ratio("kernel(kind='elu')", SDPA, 32, "forward") is not None


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    folder = tmp_path / "out"
    words = [
        "--lengths",
        "16,32",
        "64",
        "--heads",
        "2",
        "--head-dim",
        "8",
        "--threads",
        "1",
        "--no-backward",
        "--methods",
    ]
    assert main(["bench", *words, "window(size=4)", "--out", str(folder)]) == 0
    caught = capsys.readouterr()
    found = read_json(folder / "bench.json")
    assert found.settings.lengths == (16, 32, 64)
    assert "window(size=4)" in caught.out
    assert "bench.json" in caught.err


def test_without_matplotlib_it_says_so_and_continues(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ["--lengths", "8", "--heads", "1", "--head-dim", "4", "--threads", "1", "--no-backward", "--methods"]
    assert main(["bench", *words, "window(size=4)", "--out", str(tmp_path)]) == 0
    assert "pip install 'sparing[bench]'" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "nystrm"], "unknown name 'nystrm'"),
        (["--methods", ","], "methods is empty"),
        (["--methods", "top_keys(keys=4)"], "top_keys is an oracle"),
        (["--lengths", "many"], "--lengths='many'"),
        (["--lengths", "1"], "lengths=1 must be from 2"),
        (["--lengths", ","], "lengths is empty"),
        (["--heads", "0"], "heads=0"),
        (["--head-dim", "-3"], "--head-dim=-3"),
        (["--batch-size", "0"], "--batch-size=0"),
        (["--threads", "0"], "threads=0"),
        (["--seconds", "0"], "seconds=0"),
        (["--seconds", "nan"], "seconds=nan"),
        (["--out", "FILE"], "is a file"),
        (["--out", "FILE/inside"], "cannot be written to"),
        (["--out", "/proc/none"], "cannot be written to"),
    ],
)
def test_mistakes_give_one_line_and_status_2_and_leave_nothing(arguments, words, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    arguments = [a.replace("FILE", str(tmp_path / "file")) for a in arguments]
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "new")]
    assert main(["bench", *arguments, *out]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_run_that_is_stopped_leaves_nothing(capsys, tmp_path, monkeypatch):
    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "race", stopped)
    given = ["bench", "--lengths", "16", "--heads", "1", "--methods", "window", "--out", str(tmp_path / "new")]
    assert main(given) == 130
    assert capsys.readouterr().err.strip() == "sparing bench: stopped"
    assert not list(tmp_path.iterdir())
