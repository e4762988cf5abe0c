"""Speed of every method against SDPA over the length, forward, in one run: ratios, medians of interleaved rounds.

    python benchmarks/speed.py [--lengths 512 1024 4096] [--heads 12] [--width 64] [--methods SPECS] [--seconds 20]

A method whose next length would take longer than `--seconds` per call (extrapolated) is left out from there on.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

import sparing
from sparing.measure.timing import speed_ratio

METHODS = (
    "kernel(kind=elu),window(size=256),lsh(rounds=4, chunk=64),random_features(features=256),linformer(rank=256),"
    "nystrom(landmarks=64),skyformer(landmarks=128),yoso(hashes=32)"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 4096])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    specs = sparing.split_specs(options.methods)
    last = dict.fromkeys(specs, 0.0)
    print(
        f"{options.heads} heads x {options.width}, float32, {torch.get_num_threads()} threads; SDPA time / method time"
    )
    print("method".ljust(36) + "".join(f"n={n}".rjust(12) for n in options.lengths))
    lines = {spec: spec.ljust(36) for spec in specs}
    for n in options.lengths:
        q, k, v = torch.randn(3, 1, options.heads, n, options.width).unbind(0)
        for spec in specs:
            if last[spec] > options.seconds / 8:
                lines[spec] += "-".rjust(12)
                continue

            def run(spec: str = spec, q=q, k=k, v=v) -> object:
                return sparing.attention(q, k, v, method=spec, seed=0)

            def sdpa(q=q, k=k, v=v) -> object:
                return scaled_dot_product_attention(q, k, v)

            with torch.no_grad():
                start = time.perf_counter()
                run()
                last[spec] = time.perf_counter() - start
                ratio = speed_ratio(sdpa, run, rounds=5)
            lines[spec] += f"{ratio.median:.2f}x".rjust(12)
    print("\n".join(lines.values()))


if __name__ == "__main__":
    main()
