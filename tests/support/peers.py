"""Stand-ins for the programs that we are compared with: what they answer was recorded from the real ones."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

FIO = """#!{python}
import json, os, sys
options = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if "=" in argument)
if sys.argv[1:] == ["--version"]:
    print("fio-3.33")
    sys.exit()
with open({log!r}, "a") as log:
    log.write(json.dumps(options) + "\\n")
if options["ioengine"] in {broken!r}:
    print("fio: engine " + options["ioengine"] + " not loadable", file=sys.stderr)
    sys.exit(1)
size = int(options["size"])
assert os.stat(options["filename"]).st_size >= size
half = options["rw"] == "rw"
moved = {{"read": size if options["rw"] == "read" else size // 2 * half, "write": size if options["rw"] == "write" else size // 2 * half}}
milliseconds = {{"io_uring": 20, "libaio": 10}}[options["ioengine"]]
side = {{name: {{"io_bytes": nbytes, "runtime": milliseconds if nbytes else 0, "total_ios": 1}} for name, nbytes in moved.items()}}
print("note: fio may say something first")
print(json.dumps({{"fio version": "fio-3.33", "jobs": [
    {{"jobname": "infinity", "error": 0, **side, "job_runtime": milliseconds, "usr_cpu": 10.0, "sys_cpu": 40.0}}]}}))
"""

TORCH = """
__version__ = "2.0-fake"
uint8 = "uint8"
def empty(*shape, dtype): return None
"""

DEEPSPEED = """
print("noise that must not be taken for an answer")
__version__ = "0.19-fake"
"""

OP_BUILDER = """
import os
class Tensor:
    def __init__(self, memory): self.memory = memory
    def numel(self): return len(self.memory)
    def random_(self, low, high): self.memory[:] = os.urandom(len(self.memory))
    def __getitem__(self, part): return Tensor(self.memory[part])
class Handle:
    def __init__(self, block, depth, single_submit, overlap_events, threads): self.done = 0
    def new_cpu_locked_tensor(self, numel, like): return Tensor(memoryview(bytearray(numel)))
    def free_cpu_locked_tensor(self, tensor): pass
    def _move(self, call, tensor, path, offset, flags):
        fd = os.open(path, flags)
        assert call(fd, [tensor.memory], offset) == len(tensor.memory)
        os.close(fd)
        self.done += 1
        return 0
    def async_pread(self, tensor, path, offset): return self._move(os.preadv, tensor, path, offset, os.O_RDONLY)
    def async_pwrite(self, tensor, path, offset): return self._move(os.pwritev, tensor, path, offset, os.O_WRONLY)
    def wait(self):
        done, self.done = self.done, 0
        return done - LOST
class AsyncIOBuilder:
    def load(self):
        if BROKEN: raise RuntimeError("Unable to JIT load the async_io op")
        return type("op", (), {"aio_handle": Handle})
"""


def install_fio(directory: Path, *, broken: tuple[str, ...] = ()) -> Path:
    """Makes ``directory/fio``; the options of each of its runs go, as a line of JSON, into the file that is returned."""
    directory.mkdir(exist_ok=True)
    log = directory / "fio.log"
    log.touch()
    program = directory / "fio"
    program.write_text(FIO.format(python=sys.executable, log=str(log), broken=broken))
    program.chmod(0o755)
    return log


def runs_of(log: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def install_deepspeed(directory: Path, *, broken: bool = False, lost: int = 0) -> dict[str, str]:
    """Makes importable stand-ins; the variables of a process that imports them."""
    (directory / "deepspeed" / "ops").mkdir(parents=True)
    (directory / "torch.py").write_text(TORCH)
    (directory / "deepspeed" / "__init__.py").write_text(DEEPSPEED)
    (directory / "deepspeed" / "ops" / "__init__.py").write_text("")
    (directory / "deepspeed" / "ops" / "op_builder.py").write_text(f"BROKEN, LOST = {broken}, {lost}\n" + OP_BUILDER)
    return {**os.environ, "PYTHONPATH": str(directory)}
