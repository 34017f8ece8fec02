"""The picture of ``infinity tune io``: what sifting saw of each setting, and the finalists in each direction."""

from __future__ import annotations

from pathlib import Path
from statistics import median, quantiles

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from infinity.io_bench import Direction
from infinity.io_tune import Search, Setting, Trial, Verdict
from infinity.sizes import format_bytes


def save(file: Path, search: Search, verdict: Verdict, title: str) -> None:
    """Write the picture; its format follows from the ending of ``file``."""
    backends = list(dict.fromkeys(setting.backend for setting in search.ratios))
    figure = Figure(figsize=(4.2 * (len(backends) + 1.4), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(backends) + 1, width_ratios=[1] * len(backends) + [1.4], squeeze=False)[0]
    for axis, backend in zip(axes, backends, strict=False):
        ratios = {setting: median(found) for setting, found in search.ratios.items() if setting.backend == backend}
        if search.default.backend == backend:
            ratios[search.default] = 1.0
        _draw_grid(axis, backend, ratios)
    _draw_finalists(axes[-1], search.trials, verdict)
    figure.suptitle(title, fontsize=10, wrap=True)
    figure.savefig(file, dpi=130)


def _draw_grid(axis: Axes, backend: str, ratios: dict[Setting, float]) -> None:
    """Both at once, to the default, over block size and requests in flight."""

    def at_once(setting: Setting) -> int:
        return setting.io_threads if backend == "threads" else setting.queue_depth

    blocks = sorted({setting.block_nbytes for setting in ratios})
    counts = sorted({at_once(setting) for setting in ratios})
    percent = [[float("nan")] * len(blocks) for _ in counts]
    for setting, ratio in ratios.items():
        percent[counts.index(at_once(setting))][blocks.index(setting.block_nbytes)] = 100 * (ratio - 1)
    axis.imshow(percent, cmap="RdYlGn", vmin=-30, vmax=30, aspect="auto", origin="lower")
    for y, row in enumerate(percent):
        for x, value in enumerate(row):
            if value == value:
                axis.text(x, y, f"{value:+.0f}", ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(blocks)), [format_bytes(block).replace(".00", "") for block in blocks], rotation=45, fontsize=8)
    axis.set_yticks(range(len(counts)), [str(count) for count in counts], fontsize=8)
    axis.set_xlabel("block size")
    axis.set_ylabel("threads" if backend == "threads" else "queue depth")
    axis.set_title(f"{backend}: % to the default, reads and writes at once", fontsize=9)


def _draw_finalists(axis: Axes, trials: list[Trial], verdict: Verdict) -> None:
    """Medians, with the quartiles as whiskers."""
    kinds = ("read", "write", "both", "step")
    width = 0.8 / max(1, len(trials))
    for index, trial in enumerate(trials):
        rates = [trial.rates[Direction.READ], trial.rates[Direction.WRITE], trial.rates[Direction.MIXED], trial.steps]
        middles = [median(values) / 1e9 for values in rates]
        quartiles = [quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3 for values in rates]
        whiskers = [
            [middle - low / 1e9 for middle, (low, _, _) in zip(middles, quartiles, strict=True)],
            [high / 1e9 - middle for middle, (_, _, high) in zip(middles, quartiles, strict=True)],
        ]
        setting = trial.setting
        count = f"{setting.io_threads} threads" if setting.backend == "threads" else f"depth {setting.queue_depth}"
        label = f"{setting.backend} {format_bytes(setting.block_nbytes).replace('.00', '')} {count}"
        label += " (default)" if index == 0 else ""
        label += " (chosen)" if trial is verdict.winner else ""
        places = [place + (index - (len(trials) - 1) / 2) * width for place in range(len(kinds))]
        axis.bar(places, middles, width, yerr=whiskers, capsize=2, label=label)
    axis.set_xticks(range(len(kinds)), kinds)
    axis.set_ylabel("GB/s")
    axis.set_title("finalists, medians and quartiles", fontsize=9)
    axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
