"""How fast are several paths together, beside each of them alone?

The pages of one backing are written and then read, page by page in order, through the queue that training uses: over each path alone, and
striped over all of them as the start of a run would do it. Alternately, --runs times. The bound is the sum of what the paths do alone; on
directories of one drive it is out of reach, because there they share what one of them has.

    python benchmarks/striping.py /mnt/nvme0 /mnt/nvme1 [--size 1GiB --page 1MiB --runs 5]

Without paths: two directories of runs/ (one drive, so nothing is to be gained), then one of them and /dev/shm (memory).
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from _measure import emit, provenance, say, scratch_directory, spread

from infinity.sizes import format_rate, parse_bytes
from infinity.task_queue import Batch, Files, TaskQueue
from infinity.tiers.frames import FramePool
from infinity.tiers.nvme import NvmeBacking

FRAMES_NBYTES = 64 << 20


class Bench:
    """A backing over some paths, and what moves its pages."""

    def __init__(self, directories: Sequence[str], *, nbytes: int, page_nbytes: int) -> None:
        self.files = Files()
        self.frames = FramePool(FRAMES_NBYTES, page_nbytes)
        self.queue = TaskQueue(self.files, n_paths=len(directories))
        self.n_slots = nbytes // page_nbytes
        self.backing = NvmeBacking(
            self.files, directories, page_nbytes=page_nbytes, n_slots=self.n_slots, queue=self.queue, frames=self.frames
        )
        for fd, path in self.backing.files():
            self.queue.add_file(fd, path)
        random = np.random.default_rng(0)
        for frame in range(self.frames.n_frames):
            self.frames.memory(frame)[:] = random.integers(0, 256, page_nbytes, np.uint8)

    def rate(self, op: str) -> float:
        """Bytes per second. A frame's next page waits for the one before, so that as many are in flight as there are frames."""
        batch = Batch()
        last: dict[int, int] = {}
        for slot in range(self.n_slots):
            fd, offset = self.backing.place(slot)
            frame = slot % self.frames.n_frames
            move = batch.write if op == "write" else batch.read
            after = (last[frame],) if frame in last else ()
            last[frame] = move(fd, offset, self.backing.slot_nbytes, self.frames.address(frame), after)
        begin_s = time.perf_counter()
        first_id = self.queue.submit(batch)
        self.queue.wait(range(first_id, first_id + self.n_slots))
        seconds = time.perf_counter() - begin_s
        failed = [done for done in self.queue.poll() if done.status]
        if failed:
            raise OSError(-failed[0].status, "a transfer failed")
        return self.n_slots * self.backing.slot_nbytes / seconds

    def close(self) -> None:
        self.queue.close()
        self.backing.close()
        self.frames.close()


@contextlib.contextmanager
def opened(cases: dict[str, list[str]], **sizes: int) -> Iterator[dict[str, Bench]]:
    with contextlib.ExitStack() as stack:
        benches = {}
        for case, directories in cases.items():
            benches[case] = Bench(directories, **sizes)
            stack.callback(benches[case].close)
        yield benches


def measure(title: str, directories: list[str], runs: int, where: dict[str, Any], **sizes: int) -> None:
    cases = {f"alone {index}": [path] for index, path in enumerate(directories)} | {"striped": directories}
    rates: dict[tuple[str, str], list[float]] = {(case, op): [] for case in cases for op in ("write", "read")}
    with opened(cases, **sizes) as benches:
        for bench in benches.values():
            bench.rate("write")  # the first write of a place is another one than the next
        for _ in range(runs):
            for op in ("write", "read"):
                for case, bench in benches.items():
                    rates[case, op].append(bench.rate(op))
        shares = [
            {"path": share.path, "file_system": share.file_system, "share": share.share, "measured": share.bytes_per_s}
            for share in benches["striped"].backing.shares
        ]
    for op in ("write", "read"):
        striped = spread(rates["striped", op])
        alone = [spread(rates[f"alone {index}", op]) for index in range(len(directories))]
        bound = sum(path["median"] for path in alone)
        emit(
            "striping",
            f"{title}, {op}",
            {"striped": striped, "alone": alone, "bound": bound, "of_bound": striped["median"] / bound, "shares": shares, **sizes},
            where,
        )
        each = ", ".join(format_rate(path["median"]) for path in alone)
        say(f"{title}, {op}: striped {format_rate(striped['median'])}; alone {each}; {striped['median'] / bound:.0%} of their sum")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="directories, one per drive")
    parser.add_argument("--size", default="512MiB", type=parse_bytes)
    parser.add_argument("--page", default="1MiB", type=parse_bytes)
    parser.add_argument("--runs", default=5, type=int)
    arguments = parser.parse_args()
    sizes = {"nbytes": arguments.size, "page_nbytes": arguments.page}
    where = provenance()
    with contextlib.ExitStack() as stack:

        def scratch(parent: str | None) -> str:
            return stack.enter_context(scratch_directory(parent))

        if arguments.paths:
            measure("the paths given", [scratch(path) for path in arguments.paths], arguments.runs, where, **sizes)
            return
        measure("two directories of one drive", [scratch(None), scratch(None)], arguments.runs, where, **sizes)
        measure("a drive and memory", [scratch(None), scratch("/dev/shm")], arguments.runs, where, **sizes)


if __name__ == "__main__":
    main()
