"""How slots are dealt to paths: how many each gets, and which ones.

Pure arithmetic. It changes no content: a slot's path is where its bytes are, not what they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np


def share_slots(n_slots: int, rates: Sequence[float], capacities: Sequence[tuple[Sequence[int], int]]) -> list[int]:
    """How many of ``n_slots`` each path gets: in proportion to its rate, but no more than has room; the rest goes to the others.

    ``capacities`` has, for each file system, the paths on it and the slots that fit there; each path is on one.
    Errors: ValueError when they do not fit.
    """
    if sum(slots for _, slots in capacities) < n_slots:
        raise ValueError(f"{n_slots} slots do not fit {capacities}")
    counts = [0] * len(rates)
    left, still = n_slots, list(capacities)
    while still:
        weights = [sum(rates[path] for path in paths) for paths, _ in still]
        shares = _apportion(left, weights)
        full = [index for index, (_, slots) in enumerate(still) if shares[index] > slots]
        for index in full or range(len(still)):
            paths, slots = still[index]
            given = min(shares[index], slots)
            left -= given
            for path, count in zip(paths, _apportion(given, [rates[path] for path in paths]), strict=True):
                counts[path] = count
        still = [entry for index, entry in enumerate(still) if index not in full] if full else []
    return counts


def deal(counts: Sequence[int]) -> tuple[array[int], array[int]]:
    """The path of each slot, and its index among that path's, so that any run of slots is spread in proportion to ``counts``.

    The j-th slot of a path with n of all N slots stands at (j + 1/2) / n of the way. Hence of any run of r slots such a path holds
    r n / N, give or take less than 1 + the number of paths.
    """
    paths = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    index = np.concatenate([np.arange(count, dtype=np.uint64) for count in counts]) if counts else np.empty(0, np.uint64)
    way = (index + 0.5) / np.repeat(np.asarray(counts, dtype=np.float64), counts)
    order = np.argsort(way, kind="stable")
    return array("B", paths[order].tobytes()), array("Q", index[order].tobytes())


def _apportion(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` cut in proportion to ``weights`` into whole numbers, the largest remainders rounded up."""
    whole = sum(weights)
    exact = [total * (weight / whole) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts
