"""Which way of reading and writing a drive is best for training, found with doubt.

Drives drift: they slow down when caches fill, and speed up when a neighbour leaves. So nothing is judged by one measurement, nor by
measurements of different minutes: whatever is tried is measured between two measurements of the default, and counts by its ratio to
them. First all settings are *sifted*: each round leaves the better half, until a few are left. These are measured anew in turn with the
default, in another order each round, and from those rounds alone follows the *margin* of each, with the interval that it lies in. A
setting replaces the default only where that whole interval is above it. What is left of the time goes into more rounds.

This file decides; what a measurement is, it is told. It prints nothing and knows no files.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from infinity.io_bench import Direction

FORWARD_READ_NBYTES, UPDATE_NBYTES = 2, 24
"""Per parameter and step, bf16 with nothing cached (docs/cost-model.md): forward reads 2 bytes; then backward and update read and write 12
each, at once."""
CONFIDENCE = 0.98
MARGIN_MIN = 0.01
"""A margin below it is not worth a line in a config."""
GROUP = 5
"""Settings between two measurements of the default."""
PASSES_MAX = 3
RUNS_MAX = 60
RUNS_MIN = 7
"""Fewer rounds cannot tell anything with that confidence: 1 - 2 / 2**7 is 98.4 %."""
FINALISTS = 3


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """What can be chosen."""

    backend: str
    block_nbytes: int
    queue_depth: int
    io_threads: int


Measure = Callable[[Setting, Direction], float]
"""Bytes per second of one run."""


def grid(
    default: Setting, *, backends: Sequence[str], blocks: Sequence[int], depths: Sequence[int], threads: Sequence[int]
) -> list[Setting]:
    """Every combination that differs: 'threads' has as many requests in flight as threads, and the others have no use for threads."""
    settings = dict.fromkeys(
        Setting(backend, block, depth, default.io_threads)
        for backend, block, depth in itertools.product(backends, blocks, depths)
        if backend != "threads"
    )
    if "threads" in backends:
        settings |= dict.fromkeys(Setting("threads", block, max([n, *depths]), n) for block, n in itertools.product(blocks, threads))
    settings.pop(default, None)
    return list(settings)


def step_rate(mixed: float, read: float) -> float:
    """Bytes per second over a whole training step, from the rates of reads and writes at once and of reads alone."""
    return (FORWARD_READ_NBYTES + UPDATE_NBYTES) / (FORWARD_READ_NBYTES / read + UPDATE_NBYTES / mixed)


@dataclass(frozen=True, slots=True)
class Margin:
    """By how much one setting is faster than another: a fraction, and the interval that holds it with ``CONFIDENCE``."""

    median: float
    low: float
    high: float
    rounds: int

    @property
    def noise(self) -> float:
        """What a margin must be above to count."""
        return max(self.median - self.low, MARGIN_MIN)

    @property
    def counts(self) -> bool:
        return self.rounds >= RUNS_MIN and self.median > self.noise


def margin_between(ours: Sequence[float], theirs: Sequence[float]) -> Margin:
    """The margin of ``ours`` over ``theirs``, rates measured in the same rounds.

    No distribution is assumed: the interval is of order statistics of the ratios of each round.
    """
    ratios = sorted(our / their - 1 for our, their in zip(ours, theirs, strict=True))
    n = len(ratios)
    inner = 0  # how many may be left out at either end
    while inner + 1 < (n + 1) // 2 and 2 * sum(math.comb(n, k) for k in range(inner + 2)) / 2**n <= 1 - CONFIDENCE:
        inner += 1
    return Margin(median(ratios), ratios[inner], ratios[n - 1 - inner], n)


@dataclass(slots=True)
class Trial:
    """A finalist, and what was measured of it in each round."""

    setting: Setting
    rates: dict[Direction, list[float]] = field(default_factory=lambda: {direction: [] for direction in Direction})

    @property
    def rounds(self) -> int:
        """Whole ones."""
        return min(map(len, self.rates.values()))

    @property
    def steps(self) -> list[float]:
        """The rate over a training step, round by round."""
        return [step_rate(mixed, read) for mixed, read in zip(self.rates[Direction.MIXED], self.rates[Direction.READ], strict=False)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of it: ``winner`` is the default's trial unless ``challenger``, the best of the others, counts as faster."""

    winner: Trial
    challenger: Trial | None
    margin: Margin | None


def judge(trials: Sequence[Trial]) -> Verdict:
    """The first trial is the default's. Only rounds that every trial has to the end are looked at.

    The challenger is the fastest of those whose margin counts, or where none does, the fastest.
    """
    rounds = min(trial.rounds for trial in trials)
    default, others = trials[0], trials[1:]
    if not others or not rounds:
        return Verdict(default, None, None)
    margins = [(margin_between(trial.steps[:rounds], default.steps[:rounds]), trial) for trial in others]
    margin, challenger = max(margins, key=lambda row: (row[0].counts, row[0].median))
    return Verdict(challenger if margin.counts else default, challenger, margin)


@dataclass(slots=True)
class Search:
    """One search. Its fields tell how far it is while ``run`` runs, and what is known after it was interrupted.

    Errors: whatever ``measure`` raises, KeyboardInterrupt too; what was measured before stays.
    """

    default: Setting
    settings: Sequence[Setting]
    measure: Measure
    budget_s: float
    runs: int = 7
    seed: int = 0
    clock: Callable[[], float] = time.monotonic
    progress: Callable[[Search], None] = lambda _: None

    phase: str = "sifting"
    measured: int = 0
    planned: int = 0
    ratios: dict[Setting, list[float]] = field(default_factory=dict)
    """Of each setting to the default around it, while sifting."""
    trials: list[Trial] = field(default_factory=list)

    def run(self) -> Verdict:
        order = random.Random(self.seed)
        begin = self.clock()
        self._measure(self.default, Direction.MIXED)  # the first is not to be trusted, only timed
        timed = self.clock()
        self._measure(self.default, Direction.MIXED)
        run_s = max(self.clock() - timed, 1e-6)
        least_s = run_s * self.runs * (1 + min(FINALISTS, len(self.settings))) * len(Direction)
        deadline = begin + max(self.budget_s / 4, min(self.budget_s / 2, self.budget_s - least_s))
        survivors, passes = self._choose(int((deadline - self.clock()) / run_s), order)
        self.planned = self.measured + passes * _sift_cost(len(survivors))
        while len(survivors) > FINALISTS:
            for _ in range(passes):
                self._sift(order.sample(survivors, len(survivors)), deadline)
            keep, alive = max(FINALISTS, len(survivors) // 2), set(survivors)
            survivors = [setting for setting, _ in self.ranking() if setting in alive][:keep]
        self._compare(survivors, order, begin + self.budget_s)
        return judge(self.trials)

    def ranking(self) -> list[tuple[Setting, float]]:
        """What has been sifted, the best first, with the median of its ratios to the default."""
        return sorted(((setting, median(ratios)) for setting, ratios in self.ratios.items()), key=lambda row: -row[1])

    def standing(self) -> list[tuple[Setting, float]]:
        """The best so far, and their ratios to the default: of the finalists as soon as they have been compared once."""
        rounds = min((trial.rounds for trial in self.trials), default=0)
        if len(self.trials) < 2 or not rounds:
            return self.ranking()
        default = self.trials[0].steps[:rounds]
        margins = [(trial.setting, margin_between(trial.steps[:rounds], default).median) for trial in self.trials[1:]]
        return sorted(((setting, 1 + margin) for setting, margin in margins), key=lambda row: -row[1])

    @property
    def left_out(self) -> list[Setting]:
        """What has not been measured: there was no time for it."""
        compared = [trial.setting for trial in self.trials]
        return [setting for setting in self.settings if setting not in self.ratios and setting not in compared]

    def _choose(self, sift_runs: int, order: random.Random) -> tuple[list[Setting], int]:
        """The settings that there is time for, those nearest to the default first, and how often each round measures them."""
        count = len(self.settings)
        while count > FINALISTS and _sift_cost(count) > sift_runs:
            count -= 1
        shuffled = order.sample(list(self.settings), len(self.settings))
        chosen = sorted(shuffled, key=self._distance)
        return chosen[:count], max(1, min(PASSES_MAX, sift_runs // max(1, _sift_cost(count))))

    def _distance(self, setting: Setting) -> bool:
        """Whether more than one thing differs from the default (the number of threads comes with its backend)."""
        default = self.default
        return (setting.backend != default.backend) + (setting.block_nbytes != default.block_nbytes) + (
            setting.queue_depth != default.queue_depth
        ) > 1

    def _sift(self, settings: Sequence[Setting], deadline: float) -> None:
        """Measure each once, in groups between two measurements of the default."""
        before = self._measure(self.default, Direction.MIXED)
        for begin in range(0, len(settings), GROUP):
            group = settings[begin : begin + GROUP]
            if self.clock() > deadline:
                return
            rates = [self._measure(setting, Direction.MIXED) for setting in group]
            after = self._measure(self.default, Direction.MIXED)
            for setting, rate in zip(group, rates, strict=True):
                self.ratios.setdefault(setting, []).append(rate / math.sqrt(before * after))
            before = after

    def _compare(self, finalists: Iterable[Setting], order: random.Random, deadline: float) -> None:
        """Rounds of all directions, the default and the finalists in an order of its own each."""
        self.phase = "comparing"
        self.trials = [Trial(setting) for setting in (self.default, *finalists)]
        per_round = len(self.trials) * len(Direction)
        measured, begin = self.measured, self.clock()
        for done in range(RUNS_MAX):
            now = self.clock()
            round_s = (now - begin) / done if done else 0.0
            left = int((deadline - now) / round_s) if round_s else 0
            if done >= self.runs and left < 1:
                return
            self.planned = measured + per_round * max(self.runs, min(RUNS_MAX, done + left))
            for direction in Direction:
                for trial in order.sample(self.trials, len(self.trials)):
                    trial.rates[direction].append(self._measure(trial.setting, direction))

    def _measure(self, setting: Setting, direction: Direction) -> float:
        rate = self.measure(setting, direction)
        self.measured += 1
        self.progress(self)
        return rate


def _sift_cost(count: int) -> int:
    """Runs that one pass through all rounds of sifting takes."""
    total = 0
    while count > FINALISTS:
        total += count + -(-count // GROUP) + 1
        count = max(FINALISTS, count // 2)
    return total
