"""What this machine has and lacks for infinity: every check a function from what it reads to rows, every problem with its remedy.

A problem keeps infinity from working at all; a notice is a thing to know, most often one that costs speed. What cannot be read is said in
its row, and no check needs privileges or fails for want of them. The files of the kernel are read below a ``root``, so that tests can give
another machine's; the directories examined are this machine's own. Nothing here prints.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
import re
import resource
import secrets
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import infinity
from infinity.sizes import align_up, format_bytes, format_rate

PYTHON_MIN = (3, 10)
TORCH_MIN = (2, 13)
KERNEL_WANTED = (
    ((5, 1), "io_uring"),
    ((5, 7), "moving device memory without giving it back (MREMAP_DONTUNMAP)"),
    ((6, 1), "telling the alignment of O_DIRECT (statx), and completions that interrupt nobody (io_uring DEFER_TASKRUN)"),
)
MEMLOCK_WANTED_NBYTES = 64 << 20
NOFILE_MIN, NOFILE_WANTED = 64, 1024
MAP_COUNT_WANTED = 65_530
"""The kernel's default. Unit ranges of the CPU device are made of 2 MiB mappings."""
FREE_WANTED_NBYTES = 1 << 30

_CRC_TEXT, _CRC_VALUE = b"123456789", 0xE3069283
_CRC_NBYTES = 1 << 20
_DIRECT_NBYTES = 4096
_ALIGNMENT_UNKNOWN = 4096
_CAP_IPC_LOCK = 14
_FEATURES = (
    "sse4_2",
    "pclmulqdq",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_bf16",
    "amx_bf16",
    "crc32",
    "asimd",
    "bf16",
    "sve",
)
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})
_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "afs", "orangefs"}
)
_COPYING_FILE_SYSTEMS = frozenset({"btrfs", "zfs", "bcachefs"})


class Status(Enum):
    """How a row stands."""

    OK = "ok"
    NOTICE = "notice"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing looked at.

    ``value`` is for people; ``facts`` has the same in numbers, names ending in their unit; ``remedy`` says what to do, and no problem is
    without one.
    """

    name: str
    status: Status
    value: str
    remedy: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Section:
    """Rows about one thing: the system, one path."""

    name: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found."""

    sections: tuple[Section, ...]

    def having(self, status: Status) -> list[Row]:
        return [row for section in self.sections for row in section.rows if row.status is status]

    def as_dict(self) -> dict[str, object]:
        """The report as JSON has it."""
        return {
            "infinity": infinity.__version__,
            "problems": len(self.having(Status.PROBLEM)),
            "notices": len(self.having(Status.NOTICE)),
            "sections": [
                {
                    "name": section.name,
                    "rows": [
                        {"name": row.name, "status": row.status.value, "value": row.value, "remedy": row.remedy, "facts": dict(row.facts)}
                        for row in section.rows
                    ],
                }
                for section in self.sections
            ],
        }


def ok(name: str, value: str, **facts: object) -> Row:
    return Row(name, Status.OK, value, "", facts)


def notice(name: str, value: str, remedy: str = "", **facts: object) -> Row:
    return Row(name, Status.NOTICE, value, remedy, facts)


def problem(name: str, value: str, remedy: str, **facts: object) -> Row:
    return Row(name, Status.PROBLEM, value, remedy, facts)


def examine(paths: Sequence[Path], root: Path = Path("/")) -> Report:
    """Look at everything; ``paths`` are directories that are to hold pages."""
    sections: list[Section] = []
    for name, checks in (
        ("system", (kernel_row, container_row)),
        ("versions", (python_row, infinity_row, native_row, checksum_row, numpy_row, torch_row, cuda_row)),
        ("processor", (cpu_row, cores_row, features_row, numa_row)),
        ("memory", (memory_row, memory_limit_row, swap_row, huge_pages_row, map_count_row)),
        ("I/O backends", (uring_row, libaio_row, threads_row, aio_quota_row)),
        ("limits of this process", (memlock_row, nofile_row, fsize_row, nproc_row, address_space_row)),
        ("tools", (fio_row, compiler_row)),
    ):
        rows = [_guarded(check.__name__.removesuffix("_row").replace("_", " "), functools.partial(check, root)) for check in checks]
        sections.append(Section(name, tuple(rows)))
    sections[-1:-1] = [Section(f"path {path}", tuple(path_rows(path, root))) for path in paths]
    return Report(tuple(sections))


def _guarded(name: str, check: Callable[[], Row]) -> Row:
    """A check that meets what nobody thought of is a row that says so: the others are wanted all the same."""
    try:
        return check()
    except Exception as error:
        return notice(name, f"could not be examined: {type(error).__name__}: {error}")


def read_text(root: Path, name: str) -> str | None:
    """The text of a file of the kernel, stripped, or None where it cannot be read."""
    try:
        return (root / name).read_text(errors="replace").strip()
    except OSError:
        return None


def _read_number(root: Path, name: str) -> int | None:
    text = read_text(root, name)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def _version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: '6.1.0-13-amd64' is (6, 1, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


# ---- system ----------------------------------------------------------------------------------------------------------------------


def kernel_row(root: Path) -> Row:
    release = read_text(root, "proc/sys/kernel/osrelease")
    if release is None:
        if sys.platform != "linux":
            return problem("kernel", platform.platform(), "Run infinity on Linux: files and memory are moved by calls of its kernel.")
        return notice("kernel", "version unreadable: /proc/sys/kernel/osrelease", "Mount /proc.")
    names = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', read_text(root, "etc/os-release") or "", re.MULTILINE))
    value = f"Linux {release}" + (f", {names['PRETTY_NAME']}" if "PRETTY_NAME" in names else "") + f", {platform.machine()}"
    lacking = [f"{what} (from {'.'.join(map(str, since))})" for since, what in KERNEL_WANTED if _version(release) < since]
    if lacking:
        return notice(
            "kernel",
            f"{value}: lacks {'; '.join(lacking)}",
            "Use a kernel of 6.1 or newer; what is lacking costs speed only.",
            release=release,
        )
    return ok("kernel", value, release=release)


def container_row(root: Path) -> Row:
    signs = [f"/{name}" for name in (".dockerenv", "run/.containerenv", "run/systemd/container") if (root / name).exists()]
    if re.search(r"docker|kubepods|containerd|lxc|libpod", read_text(root, "proc/1/cgroup") or ""):
        signs.append("the cgroup of process 1")
    filtered = _status_field(root, "Seccomp") == "2"
    value = f"yes ({', '.join(signs)})" if signs else "no sign of one"
    return ok("container", value + ("; system calls are filtered (seccomp)" if filtered else ""), container=bool(signs), seccomp=filtered)


def _status_field(root: Path, name: str) -> str | None:
    """A field of /proc/self/status."""
    found = re.search(rf"^{name}:\s*(\S+)", read_text(root, "proc/self/status") or "", re.MULTILINE)
    return found[1] if found else None


# ---- versions --------------------------------------------------------------------------------------------------------------------


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
        from infinity import _native, native, task_queue  # noqa: F401 - the last compares the module with abi.h
    except ImportError as error:
        return problem("native module", f"cannot be loaded: {error}", _BUILD)
    kinds = {"SCALAR": "scalar", "AVX2": "AVX2", "AVX512": "AVX-512", "NEON": "NEON"}
    names = {int(getattr(native.lib, f"INF_SIMD_{kind}")): text for kind, text in kinds.items() if hasattr(native.lib, f"INF_SIMD_{kind}")}
    simd = names.get(int(native.lib.inf_simd_best()), "unknown")
    file = Path(str(_native.__file__)).name
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
    if _version(version)[:2] < TORCH_MIN:
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


# ---- processor -------------------------------------------------------------------------------------------------------------------


def cpu_row(root: Path) -> Row:
    text = read_text(root, "proc/cpuinfo")
    if text is None:
        return notice("model", "unreadable: /proc/cpuinfo")
    found = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    name = found[1] if found else platform.machine()
    count = len(re.findall(r"^processor\s*:", text, re.MULTILINE))
    return ok("model", f"{name}, {count} logical", model=name, logical=count)


def cores_row(root: Path) -> Row:
    """What this process may use of the processors."""
    return cores_of(len(os.sched_getaffinity(0)), cpu_quota(root))


def cores_of(affinity: int, quota: float | None) -> Row:
    value = f"{affinity} by affinity, " + ("no limit of a cgroup" if quota is None else f"{quota:g} by the cgroup")
    facts = {"affinity": affinity, "quota": quota}
    if quota is not None and quota < affinity:
        remedy = f"Set OMP_NUM_THREADS={max(1, int(quota))}, so that torch does not start more threads than may run, or raise the limit (docker: --cpus)."
        return notice("cores", value, remedy, **facts)
    return ok("cores", value, **facts)


def cpu_quota(root: Path) -> float | None:
    """Cores that the cgroups of this process allow, or None."""
    found = []
    for text in _cgroup_texts(root, "cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _cgroup_texts(root: Path, controller: str, v2_name: str, *v1_names: str) -> list[str]:
    """What the cgroups of this process and those above them say, the nearest first; the files of version 1 joined by a blank."""
    texts = []
    for line in (read_text(root, "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops, names = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], [v2_name]
        elif controller in controllers.split(","):
            tops, names = [f"sys/fs/cgroup/{controllers}", f"sys/fs/cgroup/{controller}"], list(v1_names)
        else:
            continue
        for top in dict.fromkeys(tops):
            own = Path(path.lstrip("/"))
            for directory in (own, *own.parents):
                parts = [read_text(root, f"{top}/{directory}/{name}") for name in names]
                if None not in parts:
                    texts.append(" ".join(part for part in parts if part))
    return texts


def features_row(root: Path) -> Row:
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", read_text(root, "proc/cpuinfo") or "", re.MULTILINE)
    if found is None:
        return notice("features", "unreadable: /proc/cpuinfo names none")
    flags = found[1].split()
    here = [name for name in _FEATURES if name in flags]
    value = ", ".join(here) or "none that are used"
    x86 = "sse2" in flags
    if x86 and not {"avx2", "fma"} <= set(flags):
        return notice(
            "features", f"{value}; no AVX2 with FMA", "In a virtual machine, pass the host's processor on (QEMU: -cpu host).", features=here
        )
    return ok("features", value, features=here)


def numa_row(root: Path) -> Row:
    try:
        names = [path.name for path in (root / "sys/devices/system/node").iterdir()]
    except OSError:
        return ok("NUMA", "one node, or not told by the kernel", nodes=None)
    count = sum(re.fullmatch(r"node\d+", name) is not None for name in names)
    if count > 1:
        remedy = "For steady figures keep the process on the node of its drive and GPU: numactl --cpunodebind=N --membind=N infinity ..."
        return notice("NUMA", f"{count} nodes", remedy, nodes=count)
    return ok("NUMA", "one node", nodes=count)


# ---- memory ----------------------------------------------------------------------------------------------------------------------


def _meminfo(root: Path, name: str) -> int | None:
    """A line of /proc/meminfo, in bytes."""
    found = re.search(rf"^{name}:\s*(\d+) kB", read_text(root, "proc/meminfo") or "", re.MULTILINE)
    return int(found[1]) << 10 if found else None


def memory_row(root: Path) -> Row:
    total, available = _meminfo(root, "MemTotal"), _meminfo(root, "MemAvailable")
    if total is None or available is None:
        return notice("memory", "unreadable: /proc/meminfo", "Give memory.device and memory.host in bytes.")
    return ok("memory", f"{format_bytes(total)}, {format_bytes(available)} available", total_bytes=total, available_bytes=available)


def memory_limit_row(root: Path) -> Row:
    """The least of the limits of the cgroups."""
    limits = [int(text) for text in _cgroup_texts(root, "memory", "memory.max", "memory.limit_in_bytes") if text.isdigit()]
    total = _meminfo(root, "MemTotal")
    limit = min(limits, default=None)
    if limit is None or (total is not None and limit >= total):
        return ok("memory limit", "no limit of a cgroup below the machine's memory", limit_bytes=None)
    return notice(
        "memory limit",
        f"{format_bytes(limit)} by the cgroup",
        "Give memory.device and memory.host in bytes, together well below it: fractions and 'auto' are of what the whole machine has free.",
        limit_bytes=limit,
    )


def swap_row(root: Path) -> Row:
    total, free = _meminfo(root, "SwapTotal"), _meminfo(root, "SwapFree")
    if total is None or free is None:
        return notice("swap", "unreadable: /proc/meminfo")
    if total == 0:
        return ok("swap", "none", total_bytes=0, used_bytes=0)
    return ok("swap", f"{format_bytes(total)}, {format_bytes(total - free)} used", total_bytes=total, used_bytes=total - free)


def huge_pages_row(root: Path) -> Row:
    text = read_text(root, "sys/kernel/mm/transparent_hugepage/enabled")
    found = re.search(r"\[(\w+)\]", text or "")
    if found is None:
        return notice(
            "huge pages",
            "the kernel has none that are transparent, or does not tell",
            "Frames then use pages of 4 KiB, which costs speed only.",
        )
    if found[1] == "never":
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root): frames and device memory ask for them."
        return notice("huge pages", "transparent huge pages are off (never)", remedy, setting=found[1])
    return ok("huge pages", f"transparent: {found[1]}", setting=found[1])


def map_count_row(root: Path) -> Row:
    count = _read_number(root, "proc/sys/vm/max_map_count")
    if count is None:
        return notice("memory mappings", "unreadable: /proc/sys/vm/max_map_count")
    if count < MAP_COUNT_WANTED:
        remedy = "sysctl -w vm.max_map_count=262144 (as root); with too few, device memory on the CPU is given back and faulted in again."
        return notice("memory mappings", f"at most {count:,} (vm.max_map_count)", remedy, max_map_count=count)
    return ok("memory mappings", f"at most {count:,} (vm.max_map_count)", max_map_count=count)


# ---- I/O backends ----------------------------------------------------------------------------------------------------------------


@functools.cache
def probe_backends() -> Mapping[str, str | None]:
    """For each backend None when it works here, else why not. One that this build does not have is missing."""
    from infinity.task_queue import Backend, Files, TaskQueue

    answers: dict[str, str | None] = {}
    for backend in Backend:
        if backend is Backend.AUTO:
            continue
        try:
            TaskQueue(Files(), backend=backend, queue_depth=1).close()
            answers[backend.value] = None
        except OSError as error:
            answers[backend.value] = f"[{errno.errorcode.get(error.errno or 0, '?')}] {os.strerror(error.errno or 0)}"
    return answers


def uring_row(root: Path) -> Row:
    return uring_answer(probe_backends().get("uring", "not part of this build"), root)


def uring_answer(why: str | None, root: Path) -> Row:
    """About io_uring, from why it does not work (None: it does) and the settings of the kernel."""
    setting = _read_number(root, "proc/sys/kernel/io_uring_disabled")
    facts = {"works": why is None, "io_uring_disabled": setting}
    if why is None:
        return ok("uring", "works", **facts)
    release = read_text(root, "proc/sys/kernel/osrelease") or ""
    group = _read_number(root, "proc/sys/kernel/io_uring_group")
    if setting == 2:
        remedy = "sysctl -w kernel.io_uring_disabled=0 (as root)."
        value = f"does not work: {why}; kernel.io_uring_disabled is 2"
    elif setting == 1:
        remedy = f"sysctl -w kernel.io_uring_disabled=0 (as root), or join the group kernel.io_uring_group ({group})."
        value = f"does not work: {why}; kernel.io_uring_disabled is 1"
    elif release and _version(release) < (5, 1):
        remedy = "Use a kernel of 5.1 or newer."
        value = f"does not work: {why}; this kernel has no io_uring"
    elif "ENOMEM" in why:
        remedy = "Raise the limit of locked memory (ulimit -l, or LimitMEMLOCK of systemd), which kernels before 5.12 count rings against."
        value = f"does not work: {why}"
    elif _status_field(root, "Seccomp") == "2":
        remedy = "The container forbids it: run with a seccomp profile that allows io_uring_setup, io_uring_enter and io_uring_register."
        value = f"does not work: {why}; system calls are filtered (seccomp)"
    else:
        remedy = "Look for a security module or a kernel built without CONFIG_IO_URING."
        value = f"does not work: {why}"
    return notice("uring", value, f"{remedy} Until then another backend is taken.", **facts)


def libaio_row(root: Path) -> Row:
    return libaio_answer(probe_backends().get("libaio", "not part of this build"), _libaio_library(), root)


def _libaio_library() -> str | None:
    for name in ("libaio.so.1", "libaio.so.1t64"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def libaio_answer(why: str | None, library: str | None, root: Path) -> Row:
    facts = {"works": why is None, "library": library}
    calls = f"through {library}" if library else "by system calls: the library libaio is not installed, and not needed"
    if why is None:
        return ok("libaio", f"works, {calls}", **facts)
    if "EAGAIN" in why:
        remedy = "sysctl -w fs.aio-max-nr=1048576 (as root), or end what holds the contexts."
    elif "not part" in why:
        remedy = "Update infinity."
    else:
        remedy = "The kernel lacks CONFIG_AIO, or a seccomp profile forbids io_setup and io_submit."
    return notice("libaio", f"does not work: {why}", f"{remedy} Until then another backend is taken.", **facts)


def threads_row(root: Path) -> Row:
    why = probe_backends().get("threads", "not part of this build")
    if why is None:
        return ok("threads", "works", works=True)
    return problem("threads", f"does not work: {why}", "Raise the limits of processes and memory (ulimit -u, ulimit -v).", works=False)


def aio_quota_row(root: Path) -> Row:
    used, most = _read_number(root, "proc/sys/fs/aio-nr"), _read_number(root, "proc/sys/fs/aio-max-nr")
    if used is None or most is None:
        return ok("quota of libaio", "not told by the kernel: /proc/sys/fs/aio-nr, aio-max-nr")
    value = f"{used:,} of {most:,} requests reserved (fs.aio-nr, fs.aio-max-nr)"
    if most - used < 4096:
        return notice("quota of libaio", value, "sysctl -w fs.aio-max-nr=1048576 (as root), or end what holds them.", used=used, limit=most)
    return ok("quota of libaio", value, used=used, limit=most)


# ---- limits ----------------------------------------------------------------------------------------------------------------------


def _limit(number: int) -> tuple[int | None, int | None]:
    """(soft, hard), None for none."""
    soft, hard = resource.getrlimit(number)
    return (None if soft == resource.RLIM_INFINITY else soft), (None if hard == resource.RLIM_INFINITY else hard)


def memlock_row(root: Path) -> Row:
    capabilities = _status_field(root, "CapEff")
    free_of_it = capabilities is not None and bool(int(capabilities, 16) >> _CAP_IPC_LOCK & 1)
    return memlock_of(*_limit(resource.RLIMIT_MEMLOCK), free_of_it)


def memlock_of(soft: int | None, hard: int | None, free_of_it: bool) -> Row:
    """About locked memory; a process with CAP_IPC_LOCK is free of the limit."""
    name, facts = "locked memory", {"soft_bytes": soft, "hard_bytes": hard, "privileged": free_of_it}
    if soft is None:
        return ok(name, "no limit", **facts)
    value = f"at most {format_bytes(soft)} (RLIMIT_MEMLOCK)"
    if free_of_it:
        return ok(name, f"{value}, which does not bind this process (CAP_IPC_LOCK)", **facts)
    if soft < MEMLOCK_WANTED_NBYTES:
        first = (
            "ulimit -l unlimited"
            if hard is None
            else "raise it in /etc/security/limits.conf (memlock), or LimitMEMLOCK of systemd, or docker --ulimit memlock=-1"
        )
        return notice(
            name, value, f"{first}; frames that are not locked work as well: io_uring is then not told of them beforehand.", **facts
        )
    return ok(name, value, **facts)


def nofile_row(root: Path) -> Row:
    return nofile_of(*_limit(resource.RLIMIT_NOFILE))


def nofile_of(soft: int | None, hard: int | None) -> Row:
    name, facts = "open files", {"soft": soft, "hard": hard}
    if soft is None:
        return ok(name, "no limit", **facts)
    value, remedy = f"at most {soft:,} (RLIMIT_NOFILE)", "Raise it: ulimit -n 4096 (limits.conf: nofile; docker: --ulimit nofile=4096)."
    if soft < NOFILE_MIN:
        return problem(name, value, remedy, **facts)
    return notice(name, value, remedy, **facts) if soft < NOFILE_WANTED else ok(name, value, **facts)


def fsize_row(root: Path) -> Row:
    return fsize_of(_limit(resource.RLIMIT_FSIZE)[0])


def fsize_of(soft: int | None) -> Row:
    if soft is None:
        return ok("length of a file", "no limit", soft_bytes=None)
    remedy = "ulimit -f unlimited: pages of one drive rest in files of up to 1 TiB."
    return notice("length of a file", f"at most {format_bytes(soft)} (RLIMIT_FSIZE)", remedy, soft_bytes=soft)


def nproc_row(root: Path) -> Row:
    return nproc_of(_limit(resource.RLIMIT_NPROC)[0])


def nproc_of(soft: int | None) -> Row:
    if soft is None:
        return ok("processes and threads", "no limit", soft=None)
    value = f"at most {soft:,} of this user (RLIMIT_NPROC)"
    if soft < 256:
        return notice("processes and threads", value, "ulimit -u 4096: torch and the queue start threads.", soft=soft)
    return ok("processes and threads", value, soft=soft)


def address_space_row(root: Path) -> Row:
    return address_space_of(_limit(resource.RLIMIT_AS)[0])


def address_space_of(soft: int | None) -> Row:
    if soft is None:
        return ok("address space", "no limit", soft_bytes=None)
    remedy = "ulimit -v unlimited: each unit reserves addresses for its life, though not memory."
    return notice("address space", f"at most {format_bytes(soft)} (RLIMIT_AS)", remedy, soft_bytes=soft)


# ---- a path ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of /proc/self/mountinfo."""

    device: str
    point: str
    kind: str
    source: str
    options: frozenset[str]


def parse_mounts(text: str) -> list[Mount]:
    """The mounts of a /proc/self/mountinfo, in its order; a line that is not one is left out."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if separator and len(fields) >= 6 and len(rest) >= 2:
            options = fields[5].split(",") + (rest[2].split(",") if len(rest) > 2 else [])
            mounts.append(Mount(fields[2], _unescape(fields[4]), rest[0], _unescape(rest[1]), frozenset(options)))
    return mounts


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that an absolute path without links is on: the deepest, and of those at one place the last."""
    best = None
    for mount in mounts:
        point = mount.point.rstrip("/")
        if (path == point or path.startswith(point + "/")) and (best is None or len(point) >= len(best.point.rstrip("/"))):
            best = mount
    return best


def path_rows(path: Path, root: Path) -> list[Row]:
    """What a directory for pages is like; where it is missing, that is all there is to say."""
    written = writable_row(path)
    if written.status is Status.PROBLEM and not path.is_dir():
        return [written]
    real = os.path.realpath(path)
    mount = mount_of(real, parse_mounts(read_text(root, "proc/self/mountinfo") or ""))
    return [
        written,
        _guarded("file system", lambda: file_system_row(mount)),
        _guarded("device", lambda: device_row(mount, root)),
        _guarded("O_DIRECT", lambda: direct_row(real, writable=written.status is Status.OK)),
        _guarded("free space", lambda: space_row(os.statvfs(real))),
        _guarded("inodes", lambda: inodes_row(os.statvfs(real))),
        _guarded("disk quota", lambda: quota_row(mount)),
        _guarded("leftovers", lambda: leftovers_row(real)),
    ]


def writable_row(path: Path) -> Row:
    from infinity.tiers.nvme import check_path

    wrong = check_path(path)
    if wrong is None:
        return ok("directory", "exists and can be written")
    value, _, remedy = wrong.removeprefix(f"{path} ").partition(". ")
    return problem("directory", value, remedy)


def file_system_row(mount: Mount | None) -> Row:
    if mount is None:
        return notice("file system", "not found in /proc/self/mountinfo")
    value = f"{mount.kind} on {mount.point} ({mount.source})"
    facts = {"kind": mount.kind, "mount": mount.point, "source": mount.source}
    if mount.kind in _MEMORY_FILE_SYSTEMS:
        return notice(
            "file system",
            f"{value}: it is memory",
            "Name a directory on a drive: pages here take the memory that they should save.",
            **facts,
        )
    if mount.kind in _NETWORK_FILE_SYSTEMS:
        return notice(
            "file system",
            f"{value}: on a network or a host",
            "Name a directory on a drive of this machine: latency and others' load decide here.",
            **facts,
        )
    if mount.kind == "overlay":
        return notice(
            "file system",
            f"{value}: the layers of a container",
            "Mount a directory of the drive into the container (docker: -v) and name that.",
            **facts,
        )
    if mount.kind.startswith("fuse"):
        return notice(
            "file system",
            f"{value}: served by a process (FUSE)",
            "Name a directory on a file system of the kernel's: ext4 or xfs.",
            **facts,
        )
    if mount.kind in _COPYING_FILE_SYSTEMS:
        return notice(
            "file system",
            f"{value}: copies on write",
            "ext4 or xfs is faster for pages that are written over and over (btrfs: chattr +C on the directory helps).",
            **facts,
        )
    return ok("file system", value, **facts)


def device_row(mount: Mount | None, root: Path) -> Row:
    """The drive below the mount, as /sys tells it."""
    node = _block_device(mount, root) if mount else None
    if node is None:
        return ok("device", "not one drive that /sys knows")
    disk = node if (node / "queue").is_dir() else node.parent  # a partition is a directory in that of its drive
    parts = sorted(path.name for path in (node / "slaves").iterdir()) if (node / "slaves").is_dir() else []
    model = read_text(disk, "device/model")
    rotational = read_text(disk, "queue/rotational")
    scheduler = re.search(r"\[([\w-]+)\]", read_text(disk, "queue/scheduler") or "")
    told = [
        f"model {model}" if model else "model not told",
        {"0": "solid state", "1": "rotating"}.get(rotational or "", "kind not told"),
        f"scheduler {scheduler[1]}" if scheduler else "no scheduler",
    ]
    value = f"{node.name}: {', '.join(told)}" + (f", made of {', '.join(parts)}" if parts else "")
    facts = {"device": node.name, "model": model, "rotational": rotational == "1", "scheduler": scheduler[1] if scheduler else None}
    if rotational == "1":
        remedy = "Name a directory on an SSD: a disk that turns gives some 200 MB/s. (Virtual drives may claim to turn and do not.)"
        return notice("device", value, remedy, **facts)
    return ok("device", value, **facts)


def _block_device(mount: Mount, root: Path) -> Path | None:
    for link in (root / "sys/dev/block" / mount.device, root / "sys/class/block" / os.path.basename(mount.source)):
        if link.exists() and (link.parent.name == "block"):
            return link.resolve()
    return None


def direct_row(directory: str, *, writable: bool) -> Row:
    """Whether O_DIRECT works, by writing and reading a block of a file that has no name any more when this returns."""
    if not writable:
        return notice("O_DIRECT", "not tried: nothing can be written here")
    from infinity.task_queue import Files

    name = os.path.join(directory, f"infinity-direct-test-{os.getpid()}-{secrets.token_hex(8)}")
    files = Files()
    try:
        try:
            fd = files.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        finally:
            if os.path.exists(name):
                os.unlink(name)  # some file systems make the file before they refuse
        try:
            told = max(files.direct_alignment(fd))
            alignment = told or _ALIGNMENT_UNKNOWN
            nbytes = align_up(_DIRECT_NBYTES, alignment)
            with mmap.mmap(-1, 2 * nbytes) as memory, memoryview(memory) as view:
                view[:nbytes] = secrets.token_bytes(nbytes)
                written, read = os.pwrite(fd, view[:nbytes], 0), os.preadv(fd, [view[nbytes:]], 0)
                whole = written == read == nbytes and view[:nbytes] == view[nbytes:]
        finally:
            files.close(fd)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return notice("O_DIRECT", f"not tried: {error.strerror}", "Free some space.")
        return notice(
            "O_DIRECT",
            f"refused: {error.strerror}",
            "Pages go through the page cache here, which takes memory and time; ext4 and xfs take O_DIRECT.",
            works=False,
        )
    if not whole:
        return problem(
            "O_DIRECT",
            "what was written is not what was read",
            "Do not use this file system: check the drive (dmesg, smartctl).",
            works=False,
        )
    said = "" if told else " (the kernel does not say; kernels from 6.1 do)"
    return ok("O_DIRECT", f"works, aligned to {alignment:,} bytes{said}", works=True, alignment=alignment)


def space_row(disk: os.statvfs_result) -> Row:
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    value = f"{format_bytes(free)} of {format_bytes(total)}"
    facts = {"free_bytes": free, "total_bytes": total}
    if free == 0:
        return problem("free space", value, "Free some space, or name another directory.", **facts)
    if free < FREE_WANTED_NBYTES:
        return notice("free space", value, "Free some space: with bf16, 12 bytes per parameter rest on NVMe.", **facts)
    return ok("free space", value, **facts)


def inodes_row(disk: os.statvfs_result) -> Row:
    if disk.f_files == 0:
        return ok("inodes", "made as they are needed", free=None)
    value = f"{disk.f_favail:,} of {disk.f_files:,} free"
    if disk.f_favail == 0:
        return problem("inodes", value, "Remove files: no new one can be made here.", free=0)
    return ok("inodes", value, free=disk.f_favail)


_QUOTA = struct.Struct("=8QI4x")  # struct if_dqblk
_Q_GETQUOTA, _USRQUOTA, _QIF_BLIMITS = 0x800007, 0, 1
_QUOTA_BLOCK = 1024


def quota_row(mount: Mount | None) -> Row:
    """The disk quota of this user, as ``quotactl`` tells it."""
    if mount is None or not mount.source.startswith("/dev/"):
        return ok("disk quota", "not asked for: no block device is mounted here")
    answer = ctypes.create_string_buffer(_QUOTA.size)
    libc = ctypes.CDLL(None, use_errno=True)
    call = ctypes.c_int(_Q_GETQUOTA << 8 | _USRQUOTA)
    if libc.quotactl(call, os.fsencode(mount.source), ctypes.c_int(os.getuid()), answer) != 0:
        code = ctypes.get_errno()
        none = code in (errno.ESRCH, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
        return ok("disk quota", "none for this user" if none else f"cannot be read: {os.strerror(code)}")
    return quota_of(answer.raw)


def quota_of(raw: bytes) -> Row:
    """About a quota, from the kernel's struct if_dqblk."""
    hard, soft, used, *_, valid = _QUOTA.unpack(raw)
    limit = (hard or soft) * _QUOTA_BLOCK
    if not valid & _QIF_BLIMITS or not limit:
        return ok("disk quota", "none for this user")
    value, facts = f"{format_bytes(used)} of {format_bytes(limit)} used", {"used_bytes": used, "limit_bytes": limit}
    if limit - used < FREE_WANTED_NBYTES:
        return notice("disk quota", value, "Free some space, or have the quota raised.", **facts)
    return ok("disk quota", value, **facts)


def leftovers_row(directory: str) -> Row:
    from infinity.tiers.nvme import find_leftovers

    found = find_leftovers(directory)
    if not found:
        return ok("leftovers", "none", directories=[])
    listed = ", ".join(os.path.basename(path) for path in found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    remedy = "Nothing need be done: the next run here removes them."
    return notice("leftovers", f"{len(found)} of runs that are dead: {listed}", remedy, directories=found)


# ---- tools -----------------------------------------------------------------------------------------------------------------------


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
