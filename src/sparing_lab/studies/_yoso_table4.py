"""The paper's table 4: one instance on an NVIDIA 2080 Ti, 12 heads x 64.

By side and length: forward and backward time in milliseconds, then backward cache, training and testing peak in MB.
"""

from __future__ import annotations

QUANTITIES = ("forward", "backward", "cache", "training", "testing")
LENGTHS = (512, 1024, 2048, 4096)
_ROWS = """
self-attention 0.6/0.88 1.81/2.29 5.92/8.04 21.2/29.73 51/70/48 179/260/173 671/999/659 2589/3918/2565
YOSO-16 0.54/0.93 1.09/1.87 2.29/3.73 4.6/7.38 17/32/27 34/63/55 68/127/110 136/253/243
YOSO-32 0.71/1.21 1.49/2.43 3.11/4.88 6.31/9.89 18/44/40 36/89/80 71/178/161 142/355/345
YOSO-64 1.09/1.91 2.26/3.9 4.87/7.84 10.21/16.02 19/70/66 39/140/131 77/279/263 154/559/549
YOSO-128 1.91/3.17 4.09/6.45 9.16/13.37 19.41/28.85 22/121/117 45/242/233 89/483/467 178/967/957
Linformer-128 0.42/0.51 0.86/1.03 1.72/2.16 3.53/4.76 25/33/17 50/66/35 101/136/71 166/247/154
Linformer-256 0.53/0.67 1.05/1.36 2.16/2.85 4.02/6.16 38/55/24 76/111/49 156/233/102 239/416/227
Reformer-2 0.73/1.14 1.52/2.29 3.09/4.59 6.35/9.19 48/61/38 96/122/76 192/243/151 384/487/302
Reformer-4 1.22/2.05 2.47/4.1 5.03/8.19 10.49/16.36 86/114/71 172/228/143 344/455/286 688/911/572
Reformer-8 2.17/3.85 4.44/7.69 9.04/15.4 18.84/30.83 162/220/139 324/439/278 647/878/555 1294/1756/1111
Longformer-64 0.81/1.71 1.63/3.37 3.28/6.87 6.19/13.67 35/43/25 71/86/50 142/172/99 224/307/198
Longformer-128 0.9/2.07 1.81/4.12 3.62/8.41 6.89/16.51 41/48/32 82/96/64 165/193/127 269/345/253
Longformer-256 1.09/2.74 2.19/5.56 4.45/10.89 8.47/22.91 51/64/46 104/129/91 208/258/182 360/481/363
Longformer-512 1.42/3.95 2.96/8.65 6.05/17.86 11.54/36.14 72/103/80 148/211/159 299/423/317 538/767/585
"""

#: Side -> length -> quantity -> value.
TABLE: dict[str, dict[int, dict[str, float]]] = {}
for _line in _ROWS.split("\n")[1:-1]:
    _name, *_cells = _line.split()
    TABLE[_name] = {
        _length: dict(zip(QUANTITIES, map(float, f"{_cells[_i]}/{_cells[_i + 4]}".split("/")), strict=True))
        for _i, _length in enumerate(LENGTHS)
    }


def ratio(side: str, length: int, quantity: str) -> float | None:
    """Self-attention's / that of the side: above 1 the side takes less; None where the paper has none."""
    found = TABLE.get(side, {}).get(length)
    return None if found is None else TABLE["self-attention"][length][quantity] / found[quantity]
