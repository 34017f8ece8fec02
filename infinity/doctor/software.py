"""Versions, the native module, the I/O backends that work here, and tools."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import infinity
from infinity.doctor.rows import Row, notice, ok, problem, read_number, read_text, version_of
from infinity.sizes import format_bytes, format_rate

if TYPE_CHECKING:
    from infinity.task_queue import BackendProbe

PYTHON_MIN = (3, 10)
TORCH_MIN = (2, 13)
AIO_FREE_WANTED = 4096
_CRC_TEXT, _CRC_VALUE = b"123456789", 0xE3069283
_CRC_NBYTES = 1 << 20


def python_row(root: Path) -> Row:
    value = f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}"
    if sys.version_info[:2] < PYTHON_MIN:
        return problem("Python", value, f"Use Python {'.'.join(map(str, PYTHON_MIN))} or newer.")
    return ok("Python", value, version=platform.python_version())


def infinity_row(root: Path) -> Row:
    return ok("infinity", f"{infinity.__version__}, {Path(infinity.__file__).parent}", version=infinity.__version__)


_BUILD = "Build it (in a checkout: make, or pip install -e .); a C++17 compiler and the headers of Python are needed."


def native_row(root: Path) -> Row:
    try:
        from infinity import native, task_queue  # noqa: F401 - the second compares the module with abi.h
    except ImportError as error:
        return problem("native module", f"cannot be loaded: {error}", _BUILD)
    kinds = {"SCALAR": "scalar", "AVX2": "AVX2", "AVX512": "AVX-512", "NEON": "NEON"}
    names = {int(getattr(native.lib, f"INF_SIMD_{kind}")): text for kind, text in kinds.items() if hasattr(native.lib, f"INF_SIMD_{kind}")}
    simd = names.get(int(native.lib.inf_simd_best()), "unknown")
    file = Path(str(sys.modules["infinity._native"].__file__)).name
    abi = "the limited API of Python (abi3)" if ".abi3." in file else "this Python only"
    value = f"{file}, for {abi}; {simd} kernels"
    if simd == "scalar":
        return notice(
            "native module", value, "Use a processor with AVX2 and FMA where the update is to be fast; results are the same.", simd=simd
        )
    return ok("native module", value, simd=simd)


def checksum_row(root: Path) -> Row:
    from infinity.native import crc32c, ffi, lib

    data = bytes(_CRC_NBYTES)
    best = _rate(lambda: crc32c(data))
    table = _rate(lambda: lib.inf_crc32c_table(ffi.from_buffer(data), len(data), 0))
    return crc_row(crc32c(_CRC_TEXT), int(lib.inf_crc32c_table(_CRC_TEXT, len(_CRC_TEXT), 0)), best, table)


def _rate(call: Callable[[], object]) -> float:
    """Bytes per second of a checksum of ``_CRC_NBYTES``, the best of a few calls."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return _CRC_NBYTES / min(seconds)


def crc_row(best_value: int, table_value: int, best_rate: float, table_rate: float) -> Row:
    """About crc32c, from the checksums of ``123456789`` and the rates of the version in use and of the table."""
    name = "page checksums"
    if best_value != _CRC_VALUE or table_value != _CRC_VALUE:
        return problem(name, f"crc32c is wrong: {best_value:#010x} and {table_value:#010x} instead of {_CRC_VALUE:#010x}", _BUILD)
    hardware = best_rate > 1.5 * table_rate
    value = f"crc32c by {'the processor' if hardware else 'table'}, {format_rate(best_rate)} on one core"
    if not hardware:
        return notice(
            name, value, "The processor lacks SSE 4.2 and PCLMUL (or CRC32 of ARMv8); 'verify': 'off' saves the time.", hardware=False
        )
    return ok(name, value, hardware=True, bytes_per_s=best_rate)


def numpy_row(root: Path) -> Row:
    try:
        import numpy
    except ImportError as error:
        return problem("numpy", f"cannot be imported: {error}", "pip install numpy")
    return ok("numpy", numpy.__version__, version=numpy.__version__)


def torch_row(root: Path) -> Row:
    try:
        import torch
    except (ImportError, OSError) as error:
        return problem("torch", f"cannot be imported: {error}", "pip install torch (its install page has the command for this machine)")
    version = str(torch.__version__)
    if version_of(version)[:2] < TORCH_MIN:
        return problem("torch", version, f"Install torch {'.'.join(map(str, TORCH_MIN))} or newer.", version=version)
    return ok("torch", f"{version}, {torch.get_num_threads()} threads", version=version, threads=torch.get_num_threads())


def cuda_row(root: Path) -> Row:
    try:
        import torch
    except (ImportError, OSError):
        return notice("CUDA", "cannot be asked for without torch")
    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append((str(properties.name), int(properties.total_memory)))
    driver = re.search(r"Kernel Module(?:\s+for\s+\S+)?\s+(\d[\d.]*)", read_text(root, "proc/driver/nvidia/version") or "")
    return cuda_devices_row(driver[1] if driver else None, torch.version.cuda, devices)


def cuda_devices_row(driver: str | None, built_for: str | None, devices: Sequence[tuple[str, int]]) -> Row:
    """About CUDA, from the version of the driver, that which torch was built for, and the devices that torch finds (name, bytes)."""
    facts = {"driver": driver, "built_for": built_for, "devices": [{"name": name, "nbytes": nbytes} for name, nbytes in devices]}
    if devices:
        listed = ", ".join(f"{name} ({format_bytes(nbytes)})" for name, nbytes in devices)
        return ok("CUDA", f"{listed}; torch built for {built_for}, driver {driver or 'unknown'}", **facts)
    if driver and not built_for:
        return notice(
            "CUDA", f"driver {driver} is here, but this torch is a CPU build", "Install a CUDA build of torch to use the GPU.", **facts
        )
    if driver:
        remedy = (
            "Run nvidia-smi; the driver must support the CUDA that torch was built for, and a container must be given the GPU (--gpus all)."
        )
        return notice("CUDA", f"driver {driver} is here, but torch (built for {built_for}) finds no device", remedy, **facts)
    return ok("CUDA", "no CUDA: the CPU is the device", **facts)


@functools.cache
def probes() -> Mapping[str, BackendProbe]:
    """Every backend, the best first, as it was found the first time that this was asked."""
    from infinity.task_queue import probe_backends

    return {probe.backend: probe for probe in probe_backends()}


def uring_row(root: Path) -> Row:
    return backend_row(probes()["uring"], io_uring_disabled=read_number(root, "proc/sys/kernel/io_uring_disabled"))


def libaio_row(root: Path) -> Row:
    library = _libaio_library()
    how = f"through {library}" if library else "by system calls: the library libaio is not installed, and not needed"
    return backend_row(probes()["libaio"], how, library=library)


def threads_row(root: Path) -> Row:
    return backend_row(probes()["threads"])


def backend_row(probe: BackendProbe, how: str = "", **facts: object) -> Row:
    """About one backend; without 'threads', which needs nothing, nothing works at all."""
    facts = {"works": probe.works, "reason": probe.reason, **facts}
    remedy = probe.remedy or "Look at the kernel's log (dmesg)."
    if not probe.works and probe.backend == "threads":
        return problem(probe.backend, f"does not work: {probe.reason}", remedy, **facts)
    if not probe.works:
        return notice(probe.backend, f"does not work: {probe.reason}", f"{remedy} Until then another backend is taken.", **facts)
    if probe.reason:
        return notice(probe.backend, f"works, but {probe.reason}", remedy, **facts)
    return ok(probe.backend, f"works, {how}" if how else "works", **facts)


def _libaio_library() -> str | None:
    for name in ("libaio.so.1", "libaio.so.1t64"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def aio_quota_row(root: Path) -> Row:
    used, most = read_number(root, "proc/sys/fs/aio-nr"), read_number(root, "proc/sys/fs/aio-max-nr")
    if used is None or most is None:
        return ok("quota of libaio", "not told by the kernel: /proc/sys/fs/aio-nr, aio-max-nr")
    value = f"{used:,} of {most:,} requests reserved (fs.aio-nr, fs.aio-max-nr)"
    if most - used < AIO_FREE_WANTED:
        return notice("quota of libaio", value, "sysctl -w fs.aio-max-nr=1048576 (as root), or end what holds them.", used=used, limit=most)
    return ok("quota of libaio", value, used=used, limit=most)


def fio_row(root: Path) -> Row:
    return tool_row("fio", ("fio",), "infinity bench io --against fio compares with it")


def compiler_row(root: Path) -> Row:
    return tool_row("C++ compiler", (os.environ.get("CXX", "c++").split()[0], "g++", "clang++"), "only building needs one")


def tool_row(name: str, commands: Sequence[str], use: str) -> Row:
    for command in commands:
        found = shutil.which(command)
        if found:
            return ok(name, found, path=found)
    return ok(name, f"not installed; {use}", path=None)


VERSIONS = {
    "Python": python_row,
    "infinity": infinity_row,
    "native module": native_row,
    "page checksums": checksum_row,
    "numpy": numpy_row,
    "torch": torch_row,
    "CUDA": cuda_row,
}
BACKENDS = {"uring": uring_row, "libaio": libaio_row, "threads": threads_row, "quota of libaio": aio_quota_row}
TOOLS = {"fio": fio_row, "C++ compiler": compiler_row}
