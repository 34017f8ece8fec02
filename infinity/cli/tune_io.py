"""The work of ``infinity tune io``: options into settings, a search over a drive, what came of it shown and written.

The order is: check everything, make the file, see how long a run takes, search, show, write. How settings are judged is ``io_tune``; how a
run is measured is ``io_bench``.
"""

from __future__ import annotations

import importlib.util
import json as jsonlib
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from infinity.cli.config_text import replace_text, with_block
from infinity.cli.outcome import EXIT_INTERRUPTED
from infinity.config import KEYS, load_config
from infinity.doctor.software import probes
from infinity.errors import ConfigError, ConfigProblem, InfinityError, OptionsError
from infinity.io_bench import Bench, Case, Direction
from infinity.io_tune import CONFIDENCE, Margin, Search, Setting, Trial, Verdict, grid, judge
from infinity.sizes import format_bytes, format_rate, parse_bytes
from infinity.task_queue import Backend
from infinity.tiers.nvme_path import check_path

PAGE_NBYTES_MAX = 8 << 20
"""The largest page that ``page: auto`` takes."""
PAGES_MIN = 16
SIZE_MIN = 1 << 20
RUNS_WANTED = 350
"""Runs that fit the budget: less is moved by each where it takes too long."""
RUN_NBYTES_MIN = 32 << 20
SHOWN = 5
BAR_WIDTH = 30
_SPARE_NBYTES = 256 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says; ``tune.py`` has a text for each."""

    path: Path
    size: str
    block_size: str
    queue_depth: str
    backend: str | None
    threads: str
    budget: str
    runs: int
    seed: int
    output: Path | None
    write_config: Path | None
    plot: Path | None
    json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options, read and checked."""

    size_nbytes: int
    blocks: list[int]
    depths: list[int]
    backends: list[str]
    threads: list[int]
    budget_s: float


def run(options: Options) -> int:
    """Search, show and write; the exit code.

    Errors: OptionsError with everything that is wrong, before anything is made; SpaceError, IoError.
    """
    out = Console(stderr=options.json, highlight=False, soft_wrap=True)
    plan = check(options)
    with ExitStack() as stack:
        with _bar(out, "filling the file with data that cannot be compressed") as bar:
            task = bar.add_task("", total=plan.size_nbytes)
            bench = stack.enter_context(
                Bench(
                    options.path,
                    file_nbytes=plan.size_nbytes,
                    memory_nbytes=plan.size_nbytes,
                    progress=lambda filled: bar.update(task, completed=filled),
                )
            )
        if not bench.direct:
            out.print(
                f"[yellow]note:[/] {escape(str(options.path))} does not take O_DIRECT: these are figures of the page cache, not of a drive"
            )
        drive = Drive(bench, plan)
        search = Search(
            default=drive.default,
            settings=drive.settings(plan),
            measure=drive.measure,
            budget_s=plan.budget_s,
            runs=options.runs,
            seed=options.seed,
        )
        out.print(
            f"{len(search.settings)} settings beside the default, each run {format_bytes(drive.run_nbytes)} in pages of "
            f"{format_bytes(drive.page_nbytes)}, about {plan.budget_s:g} s"
        )
        interrupted = False
        try:
            with _Shown(out, search):
                verdict = search.run()
        except KeyboardInterrupt:
            interrupted = True
            verdict = judge(search.trials) if search.trials else Verdict(Trial(search.default), None, None)
    summary = summarize(options, drive, search, verdict, interrupted)
    show(out, search, verdict, summary)
    if not interrupted:
        write(out, options, search, verdict, summary)
    if options.json:
        Console(highlight=False, soft_wrap=True).print_json(data=summary)
    return EXIT_INTERRUPTED if interrupted else 0


# ---- before ----------------------------------------------------------------------------------------------------------------------


def check(options: Options) -> Plan:
    """What is to be done.

    Errors: OptionsError with everything that is wrong.
    """
    problems: list[ConfigProblem] = []

    def each(option: str, text: str, read: Callable[[str], _T]) -> list[_T]:
        values = []
        for part in text.split(","):
            try:
                values.append(read(part.strip()))
            except ValueError as error:
                problems.append(ConfigProblem(option, str(error)))
        return list(dict.fromkeys(values))

    wrong = check_path(options.path)
    if wrong is not None:
        problems.append(ConfigProblem("PATH", wrong))
    sizes = each("--size", options.size, parse_bytes)
    if len(sizes) > 1 or (sizes and sizes[0] < SIZE_MIN):
        problems.append(ConfigProblem("--size", f"give one size of at least {format_bytes(SIZE_MIN)}"))
    elif sizes and sizes[0] + _SPARE_NBYTES > psutil.virtual_memory().available:
        available = format_bytes(psutil.virtual_memory().available)
        problems.append(ConfigProblem("--size", f"as much memory is needed, and {available} are available. Give less."))
    blocks = each("--block-size", options.block_size, lambda text: _checked("block_size", parse_bytes(text)))
    depths = each("--queue-depth", options.queue_depth, lambda text: _checked("queue_depth", _whole(text)))
    threads = each("--threads", options.threads, lambda text: _checked("intra_op_parallelism", _whole(text)))
    working = [name for name, probe in probes().items() if probe.works]
    backends = each("--backend", options.backend or ",".join(working), _backend)
    budget = each("--budget", options.budget, _seconds)
    problems += _problems_of_files(options)
    if problems:
        raise OptionsError(problems)
    return Plan(size_nbytes=sizes[0], blocks=blocks, depths=depths, backends=backends, threads=threads, budget_s=budget[0])


def _checked(name: str, value: int) -> int:
    """A value that the config takes for ``aio``'s key."""
    try:
        load_config({"train_batch_size": 1, "aio": {name: value}})
    except ConfigError as error:
        raise ValueError(error.problems[0].message) from None
    return value


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86_400:
        raise ValueError(f"{text!r} is not a time such as '60s'")
    return seconds


def _backend(text: str) -> str:
    probe = probes().get(text)
    if probe is None:
        raise ValueError(f"{text!r} is not one of {', '.join(probes())}")
    if not probe.works:
        raise ValueError(f"{text!r} does not work here: {probe.reason}. {probe.remedy}")
    return text


def _problems_of_files(options: Options) -> list[ConfigProblem]:
    """What would keep the result from being written, said before a minute is spent on it."""
    problems = []
    for option, path in (("--output", options.output), ("--plot", options.plot)):
        if path is not None and not path.resolve().parent.is_dir():
            problems.append(ConfigProblem(option, f"{path.resolve().parent} is not a directory"))
    if options.write_config is not None:
        try:
            load_config(options.write_config)
            with_block(options.write_config.read_text(encoding="utf-8"), "aio", {})
        except (InfinityError, ValueError, OSError) as error:
            problems.append(ConfigProblem("--write-config", str(error)))
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        problems.append(ConfigProblem("--plot", "matplotlib is not installed: pip install 'infinity-offload[plot]'"))
    return problems


# ---- during ----------------------------------------------------------------------------------------------------------------------


class Drive:
    """Runs on the file of ``bench``: what the default is here, and how much each run moves."""

    def __init__(self, bench: Bench, plan: Plan) -> None:
        self._bench = bench
        self.page_nbytes = PAGE_NBYTES_MAX
        while self.page_nbytes * PAGES_MIN > plan.size_nbytes:
            self.page_nbytes //= 2
        self.run_nbytes = plan.size_nbytes // (2 * self.page_nbytes) * 2 * self.page_nbytes
        aio = load_config({"train_batch_size": 1}).aio
        self._default_backend = aio.backend
        self._in_flight_nbytes = aio.in_flight
        wanted = Setting(aio.backend, aio.block_size, aio.queue_depth, aio.intra_op_parallelism)
        begin = time.perf_counter()
        taken = bench.run(self._case(wanted, Direction.MIXED))
        seconds = time.perf_counter() - begin
        self.default = replace(wanted, backend=taken.backend)
        while seconds * RUNS_WANTED > plan.budget_s and self.run_nbytes % 4 == 0 and self.run_nbytes // 2 >= RUN_NBYTES_MIN:
            self.run_nbytes //= 2
            seconds /= 2
        self.page_nbytes = min(self.page_nbytes, self.run_nbytes // 2)

    def settings(self, plan: Plan) -> list[Setting]:
        """What differs here: no block is larger than a page, and no more is in flight than aio.in_flight, or half a run, holds.

        Errors: OptionsError where nothing is left.
        """
        most = min(self._in_flight_nbytes, self.run_nbytes // 2)
        every = grid(self.default, backends=plan.backends, blocks=plan.blocks, depths=plan.depths, threads=plan.threads)
        settings = [
            setting
            for setting in every
            if setting.block_nbytes <= self.page_nbytes
            and setting.block_nbytes % self._bench.alignment == 0
            and setting.block_nbytes * (setting.io_threads if setting.backend == "threads" else setting.queue_depth) <= most
        ]
        if not settings:
            what = f"nothing to try beside the default: blocks are at most a page of {format_bytes(self.page_nbytes)}"
            raise OptionsError([ConfigProblem("--block-size, --queue-depth", f"{what}, and all in flight at most {format_bytes(most)}")])
        return settings

    def aio(self, setting: Setting) -> dict[str, object]:
        """The block of a config. The default keeps its words: 'auto' goes on to mean the best that works."""
        backend = self._default_backend if setting.backend == self.default.backend else setting.backend
        return {
            "block_size": setting.block_nbytes,
            "queue_depth": setting.queue_depth,
            "intra_op_parallelism": setting.io_threads,
            "backend": backend,
        }

    def measure(self, setting: Setting, direction: Direction) -> float:
        return self._bench.run(self._case(setting, direction)).bytes_per_s

    def _case(self, setting: Setting, direction: Direction) -> Case:
        return Case(
            direction=direction,
            nbytes=self.run_nbytes,
            block_nbytes=min(setting.block_nbytes, self.page_nbytes),
            queue_depth=setting.queue_depth,
            page_nbytes=self.page_nbytes,
            backend=Backend(setting.backend),
            io_threads=setting.io_threads,
        )


def _bar(out: Console, text: str) -> Progress:
    return Progress(TextColumn(text), BarColumn(), TimeElapsedColumn(), console=out, transient=True, disable=not out.is_terminal)


class _Shown:
    """Shows a search while it runs: a bar and the best so far on a terminal, else a line for each phase."""

    def __init__(self, out: Console, search: Search) -> None:
        self._out = out
        self._search = search
        self._phase = ""
        self._progress = Progress(TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=out)
        self._task: TaskID = self._progress.add_task("", total=None)
        self._live = Live(self._view(), console=out, refresh_per_second=8, transient=True) if out.is_terminal else None

    def __enter__(self) -> None:
        self._search.progress = self._update
        if self._live is not None:
            self._live.start()

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _update(self, search: Search) -> None:
        self._progress.update(self._task, description=search.phase, completed=search.measured, total=search.planned or None)
        if self._live is not None:
            self._live.update(self._view())
        elif search.phase != self._phase:
            self._phase = search.phase
            self._out.print(f"{search.phase} ...")

    def _view(self) -> Group:
        table = Table(title="best so far", title_justify="left", box=None, pad_edge=False)
        for name in (*COLUMNS, "to the default"):
            table.add_column(name, justify="right")
        for setting, ratio in self._search.standing()[:SHOWN]:
            table.add_row(*cells(setting), _percent(ratio - 1))
        return Group(self._progress, table)


# ---- after -----------------------------------------------------------------------------------------------------------------------

COLUMNS = ("backend", "block size", "depth", "threads")


def cells(setting: Setting) -> tuple[str, ...]:
    threads = setting.backend == "threads"
    depth = "-" if threads else str(setting.queue_depth)
    return setting.backend, format_bytes(setting.block_nbytes), depth, str(setting.io_threads) if threads else "-"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %"


def verdict_text(search: Search, verdict: Verdict, interrupted: bool) -> str:
    """What came of it, in one sentence or two."""
    margin = verdict.margin
    if interrupted:
        standing = search.standing()
        if not standing:
            return "stopped before anything was known: the default stays"
        setting, ratio = standing[0]
        return f"stopped; the best so far is {_name(setting)}, {_percent(ratio - 1)} to the default, which is not certain yet"
    if margin is None or verdict.challenger is None:
        return "there was no time to try anything: the default stays. Give a larger --budget."
    if verdict.winner is verdict.challenger:
        return f"{_name(verdict.winner.setting)} beats the default by {100 * margin.median:.1f} % {_interval(margin)}"
    said = f"nothing here beats the default by more than the noise of {100 * margin.noise:.1f} %: it stays"
    return f"{said} (the best of the others, {_name(verdict.challenger.setting)}: {_percent(margin.median)} {_interval(margin)})"


def _name(setting: Setting) -> str:
    backend, block, depth, threads = cells(setting)
    return f"{backend} with blocks of {block}, " + (f"{threads} threads" if threads != "-" else f"depth {depth}")


def _interval(margin: Margin) -> str:
    return f"(between {_percent(margin.low)} and {_percent(margin.high)} in {margin.rounds} rounds)"


def summarize(options: Options, drive: Drive, search: Search, verdict: Verdict, interrupted: bool) -> dict[str, Any]:
    """What ``--json`` prints."""
    margin = verdict.margin
    return {
        "path": str(options.path),
        "interrupted": interrupted,
        "seed": options.seed,
        "run_bytes": drive.run_nbytes,
        "page_bytes": drive.page_nbytes,
        "measured_runs": search.measured,
        "left_out": len(search.left_out),
        "verdict": verdict_text(search, verdict, interrupted),
        "beats_default": verdict.winner.setting != search.default,
        "margin": margin and {"median": margin.median, "low": margin.low, "high": margin.high, "confidence": CONFIDENCE},
        "aio": drive.aio(verdict.winner.setting),
        "default": drive.aio(search.default),
        "compared": [
            {
                "aio": drive.aio(trial.setting),
                "step": _spread(trial.steps),
                **{direction.value: _spread(trial.rates[direction]) for direction in Direction},
            }
            for trial in search.trials
        ],
        "sifted": [{"aio": drive.aio(setting), "ratio": ratio} for setting, ratio in search.ranking()],
    }


def _spread(rates: list[float]) -> dict[str, float] | None:
    """In bytes per second: the median, and the quartiles beside it."""
    if not rates:
        return None
    low, _, high = quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else (rates[0],) * 3
    return {"median": median(rates), "low": low, "high": high}


def show(out: Console, search: Search, verdict: Verdict, summary: Mapping[str, Any]) -> None:
    """The finalists as a table and as bars, the verdict, and the block to put into a config."""
    trials = sorted((trial for trial in search.trials if trial.rounds), key=lambda trial: -median(trial.steps))
    if trials:
        table = Table(title="Bytes per second, median of rounds in turn (step: as a training step reads and writes)", title_justify="left")
        for name in (*COLUMNS, "read", "write", "both at once", "step", "to the default"):
            table.add_column(name, justify="right")
        top = max(median(trial.steps) for trial in trials)
        for trial in trials:
            rates = [median(trial.rates[direction]) for direction in (Direction.READ, Direction.WRITE, Direction.MIXED)]
            against = [ours / theirs - 1 for ours, theirs in zip(trial.steps, search.trials[0].steps, strict=False)]
            last = "default" if trial is search.trials[0] else _percent(median(against))
            style = "bold green" if trial is verdict.winner else ""
            table.add_row(*cells(trial.setting), *map(format_rate, (*rates, median(trial.steps))), last, style=style)
        out.print(table)
        for trial in trials:
            rate = median(trial.steps)
            colour = "green" if trial is verdict.winner else "blue"
            out.print(f"  {_name(trial.setting):44} [{colour}]{'█' * max(1, round(BAR_WIDTH * rate / top))}[/] {format_rate(rate)}")
    out.print(summary["verdict"], style="bold")
    if search.left_out and not summary["interrupted"]:
        out.print(
            f"{len(search.left_out)} of {len(search.settings)} settings were not measured: there was no time. Give a larger --budget."
        )
    out.print(jsonlib.dumps({"aio": summary["aio"]}, indent=2))


def write(out: Console, options: Options, search: Search, verdict: Verdict, summary: Mapping[str, Any]) -> None:
    """The files that were asked for."""
    aio = summary["aio"]
    try:
        if options.output is not None:
            replace_text(options.output, jsonlib.dumps({"aio": aio}, indent=2) + "\n")
            out.print(f"wrote {escape(str(options.output))}")
        if options.write_config is not None:
            old = options.write_config.read_text(encoding="utf-8")
            aliases = [alias for key in KEYS if key.block == "aio" and key.name in aio for alias in key.aliases]
            new = with_block(old, "aio", aio, drop=aliases)
            load_config(new)
            replace_text(options.write_config, new)
            out.print(f"wrote aio into {escape(str(options.write_config))}")
        if options.plot is not None:
            from infinity.cli import tune_plot

            tune_plot.save(options.plot, search, verdict, summary["verdict"])
            out.print(f"wrote {escape(str(options.plot))}")
    except OSError as error:
        raise InfinityError(
            f"{error.filename} cannot be written: {error.strerror}. Name a file in a directory you can write to."
        ) from error
