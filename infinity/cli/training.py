"""The main job: train a GPT on bytes of text and say what happened.

The order is: check everything, show what lives where, train, evaluate, write a sample, sum up. All of it is what a user's own script
would do with ``infinity.Engine``; nothing here knows how the engine works.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from infinity.cli.outcome import EXIT_INTERRUPTED
from infinity.config import Config, load_config
from infinity.data import Batch, BatchStream, Text, open_corpus, sequential_batches
from infinity.engine import Engine
from infinity.errors import ConfigError, ConfigProblem, EngineFailedError, InfinityError
from infinity.figures import StepMetrics
from infinity.io_trace import IoTrace
from infinity.metrics import JsonLines
from infinity.models.gpt import GPT, GPTConfig, generate
from infinity.placement import Placement
from infinity.sizes import format_bytes, format_rate, format_seconds

EVAL_BATCHES = 16
"""Most batches of the held-out text that the loss after training is taken over."""
EVAL_TOKENS = 16_384
"""And most tokens, so that it takes seconds."""
FINAL_LR = 0.1
"""The learning rate at the last step, as a part of the highest."""
LOG_LINES = 20
"""Lines of progress where there is no terminal."""
RATE_STEPS = 10
"""Steps over which the rates of the progress bar are taken."""
_T = TypeVar("_T")
TIERS = ("device", "host", "nvme")
METRICS = ("step", "loss", "lr", "grad_norm", "step_s", "stall_s", "read_bytes", "write_bytes", "host_bytes", "device_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says; ``train.py`` has a text for each."""

    config: Path
    layers: int
    heads: int
    width: int
    context: int
    meta: bool
    checkpoint_activations: bool
    batch: int | None
    steps: int
    seed: int
    data: Path | None
    metrics: Path | None
    io_trace: Path | None
    sample_bytes: int
    json: bool


def run(options: Options) -> int:
    """Train as ``options`` say; the exit code.

    Errors: InfinityError, before anything is trained, for whatever is wrong with the options.
    """
    out = Console(stderr=options.json, highlight=False, soft_wrap=True)
    shape = GPTConfig(
        layers=options.layers, heads=options.heads, width=options.width, context=options.context, checkpoint=options.checkpoint_activations
    )
    config = _read_config(options)
    train_text, held_out_text = open_corpus(options.data).split()
    stream = BatchStream(train_text, batch=config.train_micro_batch_size_per_gpu, context=shape.context, seed=options.seed)
    eval_batch = max(1, min(stream.batch, EVAL_TOKENS // shape.context))
    eval_limit = max(1, min(EVAL_BATCHES, EVAL_TOKENS // (shape.context * eval_batch)))
    held_out = list(sequential_batches(held_out_text, batch=eval_batch, context=shape.context, limit=eval_limit))
    for notice in config.notices:
        out.print(f"[yellow]note:[/] {escape(notice)}")
    for path in config.nvme_paths:
        _make_directory(path, out)
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(_open("--metrics", JsonLines, options.metrics)) if options.metrics else None
        trace = stack.enter_context(_open("--io-trace", IoTrace, options.io_trace)) if options.io_trace else None
        torch.manual_seed(options.seed)
        with torch.device("meta") if options.meta else contextlib.nullcontext():
            model = GPT(shape)
        engine = stack.enter_context(Engine(model, config, seed=options.seed))
        _show_job(out, engine.placement(), config, shape, train_text, options.steps)
        job = _Job(engine, stream, options.steps, _Log(lines))
        with _interrupts(out) as interrupts:
            try:
                with _progress(out, options.steps) as shown, engine.record_io(trace) if trace else contextlib.nullcontext():
                    job.train(interrupts, shown)
                out.print("evaluating on text that was held out, then writing a sample ...")
                job.evaluate(held_out)
                job.write(options.sample_bytes, options.seed)
            except KeyboardInterrupt:
                out.print("[yellow]stopped[/]")
                with contextlib.suppress(EngineFailedError):  # an update was cut off: its figures are not to be had
                    job.finish()
        summary = job.summary(interrupted=interrupts.asked)
    _show_summary(out, summary)
    if options.json:
        Console(highlight=False, soft_wrap=True).print_json(data=summary)
    return EXIT_INTERRUPTED if interrupts.asked else 0


# ---- before ----------------------------------------------------------------------------------------------------------------------


def _read_config(options: Options) -> Config:
    config = load_config(options.config)
    if options.batch is None or options.batch == config.train_micro_batch_size_per_gpu:
        return config
    tree = config.as_dict()
    tree["train_micro_batch_size_per_gpu"] = options.batch
    del tree["train_batch_size"]
    return load_config(tree).model_copy(update={"notices": config.notices})


def _make_directory(nvme_path: str, out: Console) -> None:
    """Makes a missing path of ``nvme_path`` where that cannot surprise: one written relative and below the current directory.

    Any other is left to the engine, which refuses a missing one: a path misspelled, or on a drive that is not mounted, must not
    become a directory that fills the system's disk.
    """
    path = Path(nvme_path)
    here = Path.cwd().resolve()
    if path.is_absolute() or path.is_symlink() or path.exists() or not path.resolve().is_relative_to(here):
        return
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            [ConfigProblem("nvme_path", f"{nvme_path!r} cannot be made: {error.strerror}. Name a directory you can write to.")]
        ) from error
    out.print(f"[yellow]note:[/] made the directory {escape(str(path.resolve()))}, which nvme_path names")


def _open(option: str, kind: Callable[[Path], _T], path: Path) -> _T:
    try:
        return kind(path)
    except OSError as error:
        raise InfinityError(f"{option} {path} cannot be written: {error.strerror}. Name a file in a directory you can write to.") from error


def _show_job(out: Console, placement: Placement, config: Config, shape: GPTConfig, text: Text, steps: int) -> None:
    tokens = config.train_batch_size * shape.context
    out.print(
        f"GPT of {shape.numel / 1e6:.1f} M parameters ({shape.layers} layers, width {shape.width}, context {shape.context}), "
        f"{steps} steps of {tokens:,} bytes of {escape(text.corpus.root)} ({format_bytes(text.nbytes)})"
    )
    table = Table(title="What lives where", title_justify="left", title_style="bold")
    table.add_column("")
    for tier in TIERS:
        table.add_column(tier, justify="right")
    totals: dict[str, int] = dict.fromkeys(TIERS, 0)
    for what in dict.fromkeys(row.what for row in placement.rows):
        cells: dict[str, int] = dict.fromkeys(TIERS, 0)
        for row in placement.rows:
            if row.what == what:
                cells[row.tier] += row.nbytes
                totals[row.tier] += row.nbytes
        table.add_row(what, *map(_bytes, cells.values()))
    table.add_section()
    table.add_row("total", *map(_bytes, totals.values()), style="bold")
    table.add_row("budget", format_bytes(placement.device_budget_bytes), format_bytes(placement.host_budget_bytes), "-", style="bold")
    minimum = (placement.device_minimum_bytes, placement.host_minimum_bytes, placement.nvme_reserved_bytes)
    table.add_row("needed at least", format_bytes(minimum[0]), format_bytes(minimum[1]), _bytes(minimum[2]))
    out.print(table)
    if len(placement.paths) > 1:
        _show_paths(out, placement)
    how = {True: " past the page cache", False: " through the page cache", None: ""}[placement.direct_io]
    verify = "" if placement.direct_io is None else f", verify {config.verify}"
    out.print(f"pages of {format_bytes(placement.page_nbytes)}, moved by {placement.backend}{how}{verify}")


def _show_paths(out: Console, placement: Placement) -> None:
    table = Table(title="Pages are striped over", title_justify="left", title_style="bold")
    table.add_column("", overflow="fold")
    table.add_column("", no_wrap=True)
    for name in ("measured", "share", "reserved"):
        table.add_column(name, justify="right", no_wrap=True)
    for path in placement.paths:
        table.add_row(
            escape(path.path),
            path.file_system + ("" if path.direct else ", page cache"),
            format_rate(path.bytes_per_s) if path.bytes_per_s is not None else "-",
            f"{path.share:.0%}",
            format_bytes(path.n_slots * placement.page_nbytes),
        )
    out.print(table)


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


# ---- during ----------------------------------------------------------------------------------------------------------------------


class _Interrupts:
    """Ctrl-C: while training the first asks for an end after the step in hand; any other raises KeyboardInterrupt."""

    def __init__(self, out: Console) -> None:
        self.asked = False
        self.wait_for_step = False
        self._out = out

    def __call__(self, number: int, frame: FrameType | None) -> None:
        at_once = self.asked or not self.wait_for_step
        self.asked = True
        if at_once:
            raise KeyboardInterrupt
        self._out.print("[yellow]stopping after this step (Ctrl-C again: at once)[/]")


@contextmanager
def _interrupts(out: Console) -> Iterator[_Interrupts]:
    interrupts = _Interrupts(out)
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


class _Log:
    """Joins the loss of each step with the engine's figures of it, which may be known a step later, and writes them in order."""

    def __init__(self, lines: JsonLines | None) -> None:
        self.steps: list[StepMetrics] = []
        self._lines = lines
        self._losses: dict[int, float] = {}

    def add(self, step: int, loss: float) -> None:
        """The loss of a step that has just ended."""
        self._losses[step] = loss

    def take(self, steps: Sequence[StepMetrics]) -> None:
        """The engine's figures of further steps, in order; the loss is None where Ctrl-C came between the two."""
        for figures in steps:
            record = {name: self._losses.pop(figures.step, None) if name == "loss" else getattr(figures, name) for name in METRICS}
            self.steps.append(figures)
            if self._lines is not None:
                self._lines.write(record)


class _Shown(Protocol):
    """Where progress goes."""

    def step(self, done: int, loss: float, rates: _Rates) -> None: ...


@dataclass(frozen=True, slots=True)
class _Rates:
    """Of the last few steps together; all are 0 where nothing is known yet."""

    tokens: float
    read: float
    write: float
    stall: float
    """Part of the time that was spent waiting."""

    def __str__(self) -> str:
        return f"{self.tokens:,.0f} tok/s  read {format_rate(self.read)}  write {format_rate(self.write)}  stall {self.stall:.0%}"

    @property
    def short(self) -> str:
        return f"{self.tokens:,.0f} tok/s  r {format_rate(self.read)}  w {format_rate(self.write)}  stall {self.stall:.0%}"


def _rates(steps: Sequence[StepMetrics], tokens_per_step: int) -> _Rates:
    seconds = math.fsum(step.step_s for step in steps)
    if not seconds:
        return _Rates(0, 0, 0, 0)
    return _Rates(
        tokens=tokens_per_step * len(steps) / seconds,
        read=sum(step.read_bytes for step in steps) / seconds,
        write=sum(step.write_bytes for step in steps) / seconds,
        stall=math.fsum(step.stall_s for step in steps) / seconds,
    )


class _Bar:
    """A progress bar, redrawn in place."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=steps, loss="", rates="")

    def step(self, done: int, loss: float, rates: _Rates) -> None:
        self._progress.update(self._task, completed=done, loss=f"loss {loss:.3f}", rates=rates.short)


class _Lines:
    """Some lines of log, for files and pipes."""

    def __init__(self, out: Console, steps: int) -> None:
        self._out = out
        self._steps = steps
        self._every = math.ceil(steps / LOG_LINES)

    def step(self, done: int, loss: float, rates: _Rates) -> None:
        if done == 1 or done == self._steps or done % self._every == 0:
            self._out.print(f"step {done:{len(str(self._steps))}}/{self._steps}  loss {loss:.3f}  {rates}")


@contextmanager
def _progress(out: Console, steps: int) -> Iterator[_Shown]:
    if not out.is_terminal:
        yield _Lines(out, steps)
        return
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[loss]}", style="bold"),
        TextColumn("{task.fields[rates]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=out, expand=True, refresh_per_second=4) as progress:
        yield _Bar(progress, steps)


def lr_factor(step: int, steps: int) -> float:
    """What the learning rate of step ``step`` (from 0) is multiplied with: a warm-up over a tenth of the steps (10 to 100),
    then half a cosine."""
    warm_up = min(max(10, steps // 10), 100)
    if step < warm_up:
        return (step + 1) / warm_up
    done = min(1.0, (step - warm_up) / max(1, steps - 1 - warm_up))
    return FINAL_LR + (1 - FINAL_LR) * (1 + math.cos(math.pi * done)) / 2


class _Job:
    """The run itself: an engine, batches for it, and what is known of it so far."""

    def __init__(self, engine: Engine, stream: BatchStream, steps: int, log: _Log) -> None:
        self.engine = engine
        self.stream = stream
        self.steps = steps
        self.log = log
        self.losses: list[float] = []
        self.held_out_loss: float | None = None
        self.sample: bytes | None = None
        self.tokens_per_step = engine.train_batch_size() * stream.context

    def train(self, interrupts: _Interrupts, shown: _Shown) -> None:
        """All steps, or those until Ctrl-C."""
        schedule = LambdaLR(self.engine.optimizer, lambda step: lr_factor(step, self.steps))
        micro_steps = self.engine.gradient_accumulation_steps()
        batches = iter(self.stream)
        interrupts.wait_for_step = True
        while len(self.losses) < self.steps and not interrupts.asked:
            losses = []
            for _ in range(micro_steps):
                loss = self._loss(next(batches))
                self.engine.backward(loss)
                self.engine.step()
                losses.append(loss.item())
            schedule.step()
            self.losses.append(math.fsum(losses) / micro_steps)
            self.log.add(self.engine.global_steps, self.losses[-1])
            self.log.take(self.engine.take_finished_steps())
            shown.step(len(self.losses), self.losses[-1], _rates(self.log.steps[-RATE_STEPS:], self.tokens_per_step))
        self.finish()
        interrupts.wait_for_step = False

    def finish(self) -> None:
        """Waits for the figures of the last step."""
        self.engine.finish()
        self.log.take(self.engine.take_finished_steps())

    def evaluate(self, batches: Sequence[Batch]) -> None:
        """Sets the mean loss over ``batches``."""
        self.engine.eval()
        with torch.no_grad():
            losses = [self._loss(batch).item() for batch in batches]
        self.held_out_loss = math.fsum(losses) / len(losses)

    def write(self, nbytes: int, seed: int) -> None:
        """Sets the sample: what the model writes by itself."""
        if nbytes:
            self.sample = generate(
                self.engine, b"\n", nbytes, context=self.stream.context, device=self.engine.device, temperature=0.8, generator=seed
            )

    def summary(self, *, interrupted: bool) -> dict[str, Any]:
        """What ``--json`` prints."""
        totals = self.engine.totals()
        steps = self.log.steps
        return {
            "steps": self.engine.global_steps,
            "interrupted": interrupted,
            "parameters": self.engine.placement().n_params,
            "loss_first": self.losses[0] if self.losses else None,
            "loss_last": _mean(self.losses[-RATE_STEPS:]),
            "loss_held_out": self.held_out_loss,
            "sample": None if self.sample is None else self.sample.decode("utf-8", "replace"),
            "step_s_median": median(step.step_s for step in steps) if steps else None,
            "tokens_per_s": _rates(steps, self.tokens_per_step).tokens,
            "stall_s": totals.stall_s,
            "read_bytes": totals.read_bytes,
            "write_bytes": totals.write_bytes,
            "host_bytes_max": max((step.host_bytes for step in steps), default=None),
            "device_bytes_max": max((step.device_bytes for step in steps), default=None),
        }

    def _loss(self, batch: Batch) -> Tensor:
        tokens, targets = batch
        loss: Tensor = self.engine(tokens.to(self.engine.device), targets.to(self.engine.device))
        return loss


# ---- after -----------------------------------------------------------------------------------------------------------------------


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _show_summary(out: Console, summary: Mapping[str, Any]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()

    def row(name: str, value: float | None, text: Callable[[float], str]) -> None:
        if value is not None:
            table.add_row(name, text(value))

    if summary["loss_first"] is not None:
        steps = f"{summary['steps']} step{'' if summary['steps'] == 1 else 's'}"
        loss = f"{summary['loss_first']:.3f} -> {summary['loss_last']:.3f} nats per byte after {steps}"
        table.add_row("loss", loss + (" (interrupted)" if summary["interrupted"] else ""))
    row("held-out loss", summary["loss_held_out"], lambda loss: f"{loss:.3f} nats per byte")
    row("step", summary["step_s_median"], lambda seconds: f"{format_seconds(seconds)} (median), {summary['tokens_per_s']:,.0f} tokens/s")
    row("stalled", summary["stall_s"], format_seconds)
    row("read", summary["read_bytes"], format_bytes)
    row("written", summary["write_bytes"], format_bytes)
    out.print(table)
    if summary["sample"] is not None:
        out.print("sample of what the model writes:", style="bold")
        out.print(printable(summary["sample"]).encode(out.encoding, "replace").decode(out.encoding), markup=False)


def printable(text: str) -> str:
    """``text`` without what would move a terminal's cursor or change its colours: such characters become U+FFFD."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
