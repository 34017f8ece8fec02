"""The machine: its kernel, processor and memory, and what this process may use of them."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from pathlib import Path

from infinity.doctor.rows import Row, notice, ok, problem, read_number, read_text, status_field, version_of
from infinity.sizes import format_bytes

KERNEL_WANTED = (
    ((5, 1), "io_uring"),
    ((5, 7), "moving device memory without giving it back (MREMAP_DONTUNMAP)"),
    ((6, 1), "telling the alignment of O_DIRECT (statx), and completions that interrupt nobody (io_uring DEFER_TASKRUN)"),
)
MEMLOCK_WANTED_NBYTES = 64 << 20
NOFILE_MIN, NOFILE_WANTED = 64, 1024
NPROC_WANTED = 256
MAP_COUNT_WANTED = 65_530
"""The kernel's default. What the CPU device moves to and fro is mappings of 2 MiB."""
_CAP_IPC_LOCK = 14
_FEATURES = ["sse4_2", "pclmulqdq", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "crc32", "asimd", "sve"]


def kernel_row(root: Path) -> Row:
    release = read_text(root, "proc/sys/kernel/osrelease")
    if release is None:
        if sys.platform != "linux":
            return problem("kernel", platform.platform(), "Run infinity on Linux: files and memory are moved by calls of its kernel.")
        return notice("kernel", "version unreadable: /proc/sys/kernel/osrelease", "Mount /proc.")
    names = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', read_text(root, "etc/os-release") or "", re.MULTILINE))
    value = f"Linux {release}" + (f", {names['PRETTY_NAME']}" if "PRETTY_NAME" in names else "") + f", {platform.machine()}"
    lacking = [f"{what} (from {'.'.join(map(str, since))})" for since, what in KERNEL_WANTED if version_of(release) < since]
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
    filtered = status_field(root, "Seccomp") == "2"
    value = f"yes ({', '.join(signs)})" if signs else "no sign of one"
    return ok("container", value + ("; system calls are filtered (seccomp)" if filtered else ""), container=bool(signs), seccomp=filtered)


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
        remedy = f"Set OMP_NUM_THREADS={max(1, int(quota))}, to start no more threads than may run, or raise the limit (docker: --cpus)."
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
    count = read_number(root, "proc/sys/vm/max_map_count")
    if count is None:
        return notice("memory mappings", "unreadable: /proc/sys/vm/max_map_count")
    if count < MAP_COUNT_WANTED:
        remedy = "sysctl -w vm.max_map_count=262144 (as root); with too few, device memory on the CPU is given back and faulted in again."
        return notice("memory mappings", f"at most {count:,} (vm.max_map_count)", remedy, max_map_count=count)
    return ok("memory mappings", f"at most {count:,} (vm.max_map_count)", max_map_count=count)


def _limit(number: int) -> tuple[int | None, int | None]:
    """(soft, hard), None for none."""
    soft, hard = resource.getrlimit(number)
    return (None if soft == resource.RLIM_INFINITY else soft), (None if hard == resource.RLIM_INFINITY else hard)


def memlock_row(root: Path) -> Row:
    capabilities = status_field(root, "CapEff")
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
        how = "ulimit -l unlimited" if hard is None else "limits.conf: memlock; systemd: LimitMEMLOCK; docker: --ulimit memlock=-1"
        remedy = f"Raise it ({how}) where frames are to be registered with io_uring or locked; without, they work as well, a little slower."
        return notice(name, value, remedy, **facts)
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
    if soft < NPROC_WANTED:
        return notice("processes and threads", value, "ulimit -u 4096: torch and the queue start threads.", soft=soft)
    return ok("processes and threads", value, soft=soft)


def address_space_row(root: Path) -> Row:
    return address_space_of(_limit(resource.RLIMIT_AS)[0])


def address_space_of(soft: int | None) -> Row:
    if soft is None:
        return ok("address space", "no limit", soft_bytes=None)
    remedy = "ulimit -v unlimited: each unit reserves addresses for its life, though not memory."
    return notice("address space", f"at most {format_bytes(soft)} (RLIMIT_AS)", remedy, soft_bytes=soft)


SYSTEM = {"kernel": kernel_row, "container": container_row}
PROCESSOR = {"model": cpu_row, "cores": cores_row, "features": features_row, "NUMA": numa_row}
MEMORY = {
    "memory": memory_row,
    "memory limit": memory_limit_row,
    "swap": swap_row,
    "huge pages": huge_pages_row,
    "memory mappings": map_count_row,
}
LIMITS = {
    "locked memory": memlock_row,
    "open files": nofile_row,
    "length of a file": fsize_row,
    "processes and threads": nproc_row,
    "address space": address_space_row,
}
