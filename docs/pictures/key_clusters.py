"""The pictures of docs/key-clusters.md, from real runs: `python docs/pictures/key_clusters.py`.

Writes the SVG files beside this script; needs torch and sparing alone. The same torch gives the same files.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import torch

import sparing
from sparing.call import Call
from sparing.draws import Draws
from sparing.mask import Mask
from sparing.methods.key_clusters import KeyClusters
from sparing.methods.key_clusters.clusters import cluster, factor, spread_out, sums

COLOURS = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#3949ab",
    "#00897b", "#f9a825",
)  # fmt: skip
INK, GREY, PALE = "#222222", "#666666", "#c8c8c8"
WIDTH = 760


class Picture:
    """SVG elements on a white card, which is readable on any page; text stays text."""

    def __init__(self, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'font-family="sans-serif" font-size="13">',
            f"<title>{title}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#ffffff" stroke="#dddddd"/>',
        ]

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, fill: str = INK) -> None:
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        where = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"'
        self.parts.append(f'<text {where} fill="{fill}">{words}</text>')

    def box(self, x: float, y: float, w: float, h: float, fill: str, stroke: str = "none", rx: float = 0) -> None:
        size = f'width="{w:.1f}" height="{h:.1f}" rx="{rx:g}"'
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{fill}" stroke="{stroke}"/>')

    def dot(self, x: float, y: float, r: float, fill: str, stroke: str = "none") -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" fill="{fill}" stroke="{stroke}"/>')

    def line(self, x: float, y: float, x2: float, y2: float, stroke: str = GREY, width: float = 1) -> None:
        self.parts.append(
            f'<path d="M{x:.1f} {y:.1f}L{x2:.1f} {y2:.1f}" fill="none" stroke="{stroke}" stroke-width="{width:g}"/>'
        )

    def brace(self, x: float, x2: float, y: float, words: str) -> None:
        """A bracket under x to x2, with words below it."""
        self.parts.append(f'<path d="M{x:.1f} {y}v5H{x2:.1f}v-5" fill="none" stroke="{GREY}"/>')
        self.text((x + x2) / 2, y + 19, words, anchor="middle", size=12, fill=GREY)

    def save(self, name: str) -> None:
        (Path(__file__).parent / f"{name}.svg").write_text("\n".join([*self.parts, "</svg>", ""]))


def one_query() -> None:
    """Which keys one query reads, and through which summaries it sees the others."""
    n, d, own, count = 96, 8, 58, 12
    random = torch.Generator().manual_seed(5)
    topics = torch.randn(9, d, generator=random, dtype=torch.float64)
    topic = torch.randint(9, (n // 4,), generator=random).repeat_interleave(4)  # a text that changes its subject
    q, k, v = (2 * topics[topic] + torch.randn(n, d, generator=random, dtype=torch.float64) for _ in range(3))
    # A tiny unit matrix beside the values: the output then tells the weight that each key was given.
    tiny = 1e-6
    told = torch.cat([v, tiny * torch.eye(n, dtype=torch.float64)], dim=1)
    method = KeyClusters(clusters=count, keys=16, window=8, sinks=2)
    found = sparing.inspect(*(x[None, None] for x in (q, k, told)), method=method, seed=0, impl="reference")
    output, lse = found.output[0, 0, own], found.lse[0, 0, own]
    draws = Draws(0, torch.zeros(1, dtype=torch.long))
    call = Call(scale=d**-0.5, mask=Mask(), draws=draws)
    labels = method.plan(q[None, None], k[None, None], call).levels[0].labels[0, 0]

    logits = q[own] @ k.mT * d**-0.5
    alike = ((output[d:] / tiny).log() + lse - logits).abs() < 1e-6
    always = (labels < 0) | ((torch.arange(n) - own).abs() <= method.window // 2)
    single = (labels[:, None] == labels).sum(-1) == 1  # the summary of one key is exact, and no need to expand it
    exact = always | (alike & ~single)
    spared = [c for c in range(count) if bool((~exact & (labels == c)).any())]
    assert int(found.statistics["touched"][0, 0, own]) == int(exact.sum()) + len(spared)
    truth = logits.softmax(0) @ v
    alone = logits.masked_fill(~exact, -torch.inf).softmax(0) @ v
    error, dropped = (float((x - truth).norm() / truth.norm()) for x in (output[:d], alone))

    picture = Picture(404, "What one query reads")
    left, step, y = 40, 7.1, 146
    colour = [GREY if c < 0 else COLOURS[c] for c in labels.tolist()]
    picture.text(left, 30, f"One query and its {n} keys in the order of the text")
    picture.text(
        left, 48, "the higher, the more weight in exact attention; colour: cluster, grey: none", size=12, fill=GREY
    )
    height = 6 + 66 * (logits - logits.max()).exp().sqrt()
    for j in range(n):
        picture.box(left + j * step, y - float(height[j]), 4.6, float(height[j]), colour[j])
    for low, high, words in ((0, 1, "sinks"), (own - 4, own + 4, "window"), (n - 2, n - 1, "sinks")):
        picture.brace(left + low * step - 1, left + high * step + 5.6, y + 4, words)
    middle = left + own * step + 2.3
    picture.text(middle, 78, "query", anchor="middle", size=12, fill=GREY)
    picture.line(middle, 83, middle, 96)

    picture.text(left, 206, f"It reads {int(exact.sum())} keys one by one ...")
    x, y = float(left), 256
    expanded = (exact & ~always).nonzero().flatten()
    expanded = expanded[labels[expanded].argsort(stable=True)]
    for members, words in ((always.nonzero().flatten(), "sinks and window"), (expanded, "expanded clusters")):
        start = x
        for j in members.tolist():
            picture.box(x, y - 34, 4.6, 34, colour[j])
            x += step
        picture.brace(start - 1, x - step + 5.6, y + 4, words)
        x += 50
    picture.text(left, 308, f"... and {len(spared)} summaries, which stand for the {int((~exact).sum())} other keys")
    for i, c in enumerate(spared):
        many = int((~exact & (labels == c)).sum())
        picture.dot(left + 16 + 66 * i, 336, 3 + 3 * many**0.5, COLOURS[c])
        words = "1 key" if many == 1 else f"{many} keys"
        picture.text(left + 16 + 66 * i, 366, words, anchor="middle", size=12, fill=GREY)
    words = f"Error of the output {error:.2f}; of the same keys without the summaries {dropped:.2f}."
    picture.text(left, 390, words, size=12, fill=GREY)
    picture.save("key-clusters-query")


def metric() -> None:
    """The same keys in clusters by plain distance, and by what the queries tell apart."""
    n, count = 130, 6
    random = torch.Generator().manual_seed(3)
    k = torch.randn(n, 2, generator=random) * torch.tensor([1.5, 1.1])
    turn = torch.tensor([[0.9, 0.436], [-0.436, 0.9]])
    q = torch.randn(200, 2, generator=random) * torch.tensor([0.25, 1.6]) @ turn  # most differ in one direction only
    known = sums(q[None, None], torch.ones(1, len(q), dtype=torch.bool), len(q)).moments
    everything = torch.ones(1, 1, n, dtype=torch.bool)
    draws, wanted = Draws(1, torch.zeros(1, dtype=torch.long)), torch.tensor([[count]])
    start = spread_out(everything, wanted, draws, "picture")
    lesson = spread_out(everything, 16 * wanted, draws, "picture lesson")
    logits = k @ q.mT * 2**-0.5
    middling = int(q.square().sum(-1).argsort()[len(q) // 2])
    one = logits[:, middling]

    picture = Picture(494, "Clusters by plain distance and in the metric of the queries")
    plain = torch.eye(2, dtype=torch.float64)[None, None, None]
    for i, (name, made) in enumerate(
        (("by plain distance", plain), ("in the metric of the queries", factor(known.second)))
    ):
        found = cluster(k[None, None], made, everything, start, lesson, 10)[0, 0, 0]
        means = torch.stack([logits[found == c].mean(0) for c in range(count)])
        place = means[:, middling].argsort().argsort()[found].tolist()  # clusters are numbered by that query's logits
        left = 30 + 365 * i
        x, y, unit = left + 165, 176, 34
        picture.text(left, 32, f"{n} keys, {count} clusters {name}")
        picture.text(left, 50, "dots: keys; grey lines: queries", size=12, fill=GREY)
        for row in q[:40].tolist():
            picture.line(x, y, x + unit * row[0], y - unit * row[1], PALE, 0.7)
        for key, c in zip(k.tolist(), place, strict=True):
            picture.dot(x + unit * key[0], y - unit * key[1], 3.6, COLOURS[c])
        picture.text(left, 314, "logits of one query, cluster by cluster", size=12, fill=GREY)
        for logit, c in zip((one / one.abs().max()).tolist(), place, strict=True):
            picture.dot(x + 160 * logit, 334 + 20 * c, 3, COLOURS[c])
        scatter = float((logits - means[found]).square().mean().sqrt())
        picture.text(left, 472, f"Scatter of logits inside a cluster: {scatter:.2f}")
    picture.line(WIDTH / 2, 20, WIDTH / 2, 474, PALE)
    picture.save("key-clusters-metric")


def growing() -> None:
    """What a causal query reads of its past, at three moments of a sequence that grows."""
    chunk, clusters, d = 512, 32, 8
    block, few = chunk // 4, clusters // 4
    stories = {
        1350: "Two chunks are complete, and two quarters of the third.",
        1450: "One more quarter is complete: its clusters were appended. Nothing else has changed.",
        1560: "The chunk is complete: its own clusters take the place of its quarters', for good.",
    }
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, max(stories) + 1, d, generator=random).unbind(0)
    spec = f"key_clusters(clusters={clusters}, keys=0, window=0, sinks=0, chunk={chunk})"
    read = sparing.inspect(q, k, v, is_causal=True, method=spec, seed=0).statistics["touched"][0, 0]

    picture = Picture(452, "What a causal query reads of its past, and what is appended as tokens arrive")
    left, unit = 40, 680 / 1664
    blue, orange, green = ("#cfe2f3", COLOURS[0]), ("#fde3c8", COLOURS[1]), COLOURS[2]
    picture.text(left, 30, "What a query of a causal sequence reads")
    x = left
    for fill, stroke, words, wide in (
        (*blue, f"chunk: {clusters} summaries of {chunk} keys", 242),
        (*orange, f"quarter: {few} summaries of {block} keys", 242),
        (green, green, "own quarter: key by key", 0),
    ):
        picture.box(x + 0.5, 44, 12, 12, fill, stroke, 2)
        picture.text(x + 19, 54.5, words, size=12, fill=GREY)
        x += wide
    for i, (own, story) in enumerate(stories.items()):
        y = 106 + 120 * i
        picture.text(left, y - 12, f"token {own}")
        picture.text(left + 92, y - 12, story, size=12, fill=GREY)
        chunks, begin = own // chunk, own // block * block
        parts = [(c * chunk, chunk, clusters, blue) for c in range(chunks)]
        parts += [(b, block, few, orange) for b in range(chunks * chunk, begin, block)]
        for first, size, many, (fill, stroke) in parts:
            picture.box(left + first * unit + 1, y, size * unit - 2, 40, fill, stroke, 4)
            picture.text(left + (first + size / 2) * unit, y + 25, f"{many}", anchor="middle")
        for t in range(begin, own + 1, 8):
            picture.line(left + t * unit + 1, y, left + t * unit + 1, y + 40, green, 1.6)
        summaries, keys = sum(many for *_, many, _ in parts), own + 1 - begin
        assert int(read[own]) == summaries + keys
        picture.text(left, y + 59, f"{summaries} summaries and {keys} keys of its own quarter", size=12, fill=GREY)
    words = "Besides, and not drawn: keys of clusters that it expands, at most `keys`; the window; the sinks."
    picture.text(left, 434, words, size=12, fill=GREY)
    picture.save("key-clusters-growing")


#: (keys and summaries read, error) on MiniLM, from `sparing compare --documents 2 --methods` with the specs below.
MINILM = {
    "key_clusters(clusters, keys, window=16)": [
        (44, 0.2824), (78, 0.1283), (109, 0.0738), (148, 0.0430), (222, 0.0196),
    ],  # clusters=16, keys=16; 32, 32; 48, 48; 64, 76; 64, 160
    "oracle: the keys of largest weight": [(16, 0.5882), (64, 0.3073), (128, 0.1861), (256, 0.0806)],  # top_keys(keys)
    "window(size, sinks=1)": [(66, 0.5510), (130, 0.4492), (258, 0.3487)],  # size=64; 128; 256
}  # fmt: skip


def error() -> None:
    """Error of the output against what a query reads, as measured on MiniLM."""
    picture = Picture(360, "Error of the attention output against keys read, on the layers of MiniLM")
    left, right, top, bottom = 80, 720, 56, 300

    def at(read: float, wrong: float) -> tuple[float, float]:
        """Errors from 0.01 to 1, by their logarithm."""
        return left + (right - left) * read / 280, top - (bottom - top) * math.log10(wrong) / 2

    picture.text(left - 40, 30, "Error of the attention output (relative, mean of the layers of MiniLM, 512 tokens)")
    for wrong in (1, 0.3, 0.1, 0.03, 0.01):
        y = at(0, wrong)[1]
        picture.line(left, y, right, y, PALE, 0.7)
        picture.text(left - 8, y + 4, f"{wrong:g}", anchor="end", size=12, fill=GREY)
    for read in range(0, 281, 40):
        picture.text(at(read, 1)[0], bottom + 18, f"{read}", anchor="middle", size=12, fill=GREY)
    picture.text(
        (left + right) / 2, bottom + 40, "keys and summaries that a query reads", anchor="middle", size=12, fill=GREY
    )
    names = ((96, 256), (500, 146), (500, 84))
    for (name, points), colour, (x, y) in zip(MINILM.items(), (COLOURS[0], GREY, COLOURS[3]), names, strict=True):
        places = [at(*point) for point in points]
        for start, end in pairwise(places):
            picture.line(*start, *end, colour, 2)
        for place in places:
            picture.dot(*place, 4, colour)
        picture.text(x, y, name, size=12, fill=colour)
    picture.save("key-clusters-error")


if __name__ == "__main__":
    one_query()
    metric()
    growing()
    error()
