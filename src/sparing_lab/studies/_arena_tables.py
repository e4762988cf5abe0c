"""Tables 1 and 2 of the Skyformer paper: Text, ListOps, Retrieval, Pathfinder, Image."""

from __future__ import annotations

import statistics

from sparing_lab.studies._arena import (  # fmt: skip
    BIGBIRD,
    EXACT,
    KERNELIZED,
    LINFORMER,
    NYSTROM,
    PADDED,
    PERFORMER,
    REFORMER,
    SKYFORMER,
)

Table = dict[str, tuple[float, ...]]
#: Table 1 of the paper, in percent, and table 2, in hours and GB. Informer is not among our methods.
ACCURACY: Table = {
    EXACT: (61.95, 38.37, 80.69, 65.26, 40.57), KERNELIZED: (60.22, 38.78, 81.77, 70.73, 41.29),
    SKYFORMER: (64.70, 38.69, 82.06, 70.73, 40.77), NYSTROM: (64.83, 38.51, 80.52, 69.48, 41.30),
    LINFORMER: (58.93, 37.45, 78.19, 60.93, 37.96), PERFORMER: (64.19, 38.02, 80.04, 66.30, 41.43),
    REFORMER: (62.93, 37.68, 78.99, 66.49, 48.87), BIGBIRD: (63.86, 39.25, 80.28, 68.72, 43.16),
}  # fmt: skip
HOURS: Table = {
    EXACT: (4.30, 2.24, 8.33, 2.57, 4.22), KERNELIZED: (3.91, 1.99, 7.46, 2.42, 4.05),
    SKYFORMER: (1.02, 1.29, 1.86, 2.03, 3.40), NYSTROM: (0.71, 0.71, 1.29, 1.49, 2.70),
    LINFORMER: (0.65, 0.60, 1.13, 1.09, 2.19), PERFORMER: (0.77, 0.73, 1.41, 1.40, 2.55),
    REFORMER: (0.94, 0.85, 1.73, 1.70, 3.08), BIGBIRD: (2.00, 1.88, 3.81, 3.39, 6.53),
}  # fmt: skip
MEMORY: Table = {
    EXACT: (10.37, 5.37, 10.77, 5.74, 11.47), KERNELIZED: (5.73, 5.94, 10.46, 6.38, 6.38),
    SKYFORMER: (1.59, 1.75, 3.15, 4.13, 8.26), NYSTROM: (1.21, 1.37, 2.39, 3.35, 6.71),
    LINFORMER: (0.99, 0.99, 1.89, 1.97, 3.94), PERFORMER: (1.09, 1.09, 2.16, 2.20, 4.39),
    REFORMER: (1.61, 1.61, 2.98, 3.21, 6.42), BIGBIRD: (2.83, 2.71, 4.97, 4.97, 9.95),
}  # fmt: skip
LENGTHS = tuple(sorted(set(PADDED.values())))  #: of its tasks


def ratios(table: Table, side: str) -> dict[int, float]:
    """Self-attention's entry / the side's, by length: the mean over the tasks of that length."""
    found: dict[int, list[float]] = {}
    for number, length in enumerate(PADDED.values()):
        found.setdefault(length, []).append(table[EXACT][number] / table[side][number])
    return {length: statistics.fmean(values) for length, values in sorted(found.items())}
