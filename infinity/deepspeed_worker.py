"""DeepSpeed's asynchronous I/O as a process that does jobs: run by the Python that DeepSpeed is installed in, which need not be ours.

So this file imports nothing of infinity. It reads one job per line from stdin, JSON, and answers each on stdout in a line of JSON, the
first of which says which versions are here. What DeepSpeed prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        import deepspeed
        import torch
    except ImportError as error:
        answer(missing=str(error))
        return
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        op = AsyncIOBuilder().load()
    except Exception as error:
        answer(broken=str(error))
        return
    answer(version=deepspeed.__version__, torch=torch.__version__)
    memory = None
    for line in sys.stdin:
        job = json.loads(line)
        handles = [op.aio_handle(job["block_nbytes"], job["queue_depth"], False, True, 1) for _ in range(2)]
        if memory is None or memory.numel() < job["nbytes"]:
            if memory is not None:
                handles[0].free_cpu_locked_tensor(memory)
            memory = handles[0].new_cpu_locked_tensor(job["nbytes"], torch.empty(0, dtype=torch.uint8))
            memory.random_(0, 256)
        try:
            seconds, cpu_s = run(job, memory, *handles)
        except Exception as error:
            answer(error=str(error) or repr(error))
        else:
            answer(seconds=seconds, cpu_s=cpu_s)


def run(job: dict[str, Any], memory: Any, reader: Any, writer: Any) -> tuple[float, float]:
    """Seconds, and seconds of CPU: a call for each page, one handle for reads and one for writes, then one wait for each handle."""
    path, page_nbytes = job["path"], job["page_nbytes"]
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    calls = [0, 0]
    for index, (reads, offset) in enumerate(job["transfers"]):
        page = memory[index * page_nbytes : (index + 1) * page_nbytes]
        call = reader.async_pread if reads else writer.async_pwrite
        calls[0 if reads else 1] += 1
        if call(page, path, offset) != 0:
            raise OSError(f"the call for {page_nbytes} bytes at byte {offset} was refused")
    for handle, n in zip((reader, writer), calls, strict=True):
        done = handle.wait() if n else 0
        if done != n:
            raise OSError(f"{done} of {n} calls were completed")
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s


if __name__ == "__main__":
    main()
