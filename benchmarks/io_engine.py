"""How fast is the task queue beside fio, and beside DeepSpeed's asynchronous I/O, on the same file in the same minutes?

Two grids, each cell measured in turns with its peers, one JSON line per cell and a table at the end:

* requests: read, write and mixed, 1 MiB and 8 MiB, depth 8, 32 and 128, against the better of fio's io_uring and libaio;
* jobs: many pages of 8 MiB, and one buffer of 1 GiB, against DeepSpeed's ``aio_handle``, where a Python that has it is named.

The bound of a cell is what fio reaches on the drive. fio and DeepSpeed have the memory that they have by default, pages of 4 KiB; ours has
huge pages, of which a request needs far fewer, and that is most of any large difference. ``--peer-huge-pages`` gives them to the peers
too: what is left is the engine.

With ``--out FILE`` the lines are appended to FILE and cells that are in it already (same size, runs and revision) are not measured
again, so an interrupted run can be taken up. Estimated time at the defaults: 10 minutes, one of them for DeepSpeed.

    python benchmarks/io_engine.py [--directory DIR --size 2GiB --runs 7 --deepspeed-python PYTHON --peer-huge-pages --out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _measure import MIB, provenance, say, scratch_directory

from infinity.cli.bench_io import name_of, summary_of
from infinity.io_bench import Bench, Case, Direction
from infinity.io_peers import FIO_ENGINES, DeepSpeed, Fio, Peer, PeerError, measure
from infinity.sizes import format_rate, parse_bytes

GIB = 1 << 30
JOB_NBYTES = GIB
AIM = 1.00


@dataclass(frozen=True, slots=True)
class Cell:
    grid: str
    peer: str
    case: Case


def cells(nbytes: int, *, deepspeed: bool) -> list[Cell]:
    """Both grids, in the order in which they are measured."""
    found = [
        Cell("requests", "fio", Case(direction=direction, nbytes=nbytes, block_nbytes=block, queue_depth=depth))
        for direction, block, depth in itertools.product(Direction, (MIB, 8 * MIB), (8, 32, 128))
    ]
    job_nbytes = min(nbytes, JOB_NBYTES)
    for page_nbytes, direction in itertools.product((8 * MIB, job_nbytes), Direction):
        case = Case(direction=direction, nbytes=job_nbytes, block_nbytes=MIB, queue_depth=32, page_nbytes=page_nbytes)
        if deepspeed and not case.problems():  # one buffer is either read or written
            found.append(Cell("jobs", "deepspeed", case))
    return [cell for cell in found if not cell.case.problems()]


def key(line: dict[str, Any]) -> tuple[object, ...]:
    """What makes two lines the same measurement."""
    return tuple(line[name] for name in ("grid", "case", "size_bytes", "n_runs", "peer_huge_pages", "revision"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="on the drive to measure; default: runs/ of this checkout")
    parser.add_argument("--size", default="2GiB")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--deepspeed-python", metavar="PYTHON")
    parser.add_argument("--peer-huge-pages", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()

    where = provenance()
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out and options.out.exists() else []
    done = {key(line): line for line in lines}
    nbytes = parse_bytes(options.size)
    wanted = cells(nbytes, deepspeed=options.deepspeed_python is not None)
    table: list[dict[str, Any]] = []
    with ExitStack() as stack:
        directory = stack.enter_context(scratch_directory(options.directory))
        peers: dict[str, list[Peer]] = {}
        bench: Bench | None = None
        for index, cell in enumerate(wanted, 1):
            line: dict[str, Any] = {
                "benchmark": "io_engine",
                "grid": cell.grid,
                "case": name_of(cell.case),
                "peer_huge_pages": options.peer_huge_pages,
                "n_runs": options.runs,
                "size_bytes": cell.case.nbytes,
                "revision": where["revision"],
            }
            if key(line) in done:
                table.append(done[key(line)])
                continue
            if bench is None:
                say("filling the file ...")
                memory_nbytes = max(one.case.memory_nbytes for one in wanted)
                bench = stack.enter_context(Bench(directory, file_nbytes=nbytes, memory_nbytes=memory_nbytes))
            if cell.peer not in peers:
                peers[cell.peer] = open_peers(cell.peer, options, stack)
            say(f"{index}/{len(wanted)} {line['case']}")
            measured = measure(bench, cell.case, runs=options.runs, peers=peers[cell.peer])
            line = {**line, "direct": bench.direct, **summary_of(measured), "failures": measured.failures, **where}
            table.append(line)
            print(json.dumps(line), flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(json.dumps(line) + "\n")
    show(table)


def open_peers(name: str, options: argparse.Namespace, stack: ExitStack) -> list[Peer]:
    """Those that are here."""
    huge_pages = options.peer_huge_pages
    try:
        if name == "deepspeed":
            say("loading DeepSpeed's async_io (its first time: minutes) ...")
            peer = DeepSpeed(options.deepspeed_python, huge_pages=huge_pages)
            stack.callback(peer.close)
            return [peer]
        return [Fio(engine, huge_pages=huge_pages) for engine in FIO_ENGINES]
    except PeerError as error:
        say(f"note: {error}")
        return []


def show(table: list[dict[str, Any]]) -> None:
    """A line per cell, for people, on stderr."""
    say(f"{'case':34} {'infinity':>10} {'best peer':>10}  {'ratio':>6}  {'of each round':15} CPU s/GB")
    for line in table:
        ours = format_rate(line["bytes_per_s"]["median"])
        text = f"{line['case']:34} {ours:>10}"
        for name, ratio in line["ratios"].items():
            best = next(peer for peer in line["peers"] if (peer["name"], peer["variant"]) == (name, ratio["variant"]))
            mark = "" if ratio["median"] >= AIM else " <"
            spread = f"{ratio['min']:.2f} - {ratio['max']:.2f}"
            text += f" {format_rate(best['bytes_per_s']['median']):>10}  {ratio['median']:6.2f}  {spread:15} {line['cpu_s_per_gb']:.3f}"
            text += f"  {name} {ratio['variant']}{mark}"
        say(text)


if __name__ == "__main__":
    main()
