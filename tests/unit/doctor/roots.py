"""Other machines, as far as files of their kernel tell."""

from __future__ import annotations

from pathlib import Path

GOOD = {
    "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
    "etc/os-release": 'NAME="Debian GNU/Linux"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
    "proc/1/cgroup": "0::/init.scope\n",
    "proc/self/cgroup": "0::/user.slice/session-1.scope\n",
    "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\nSeccomp:\t0\n",
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu sse2 sse4_2 pclmulqdq avx2 fma f16c\n\nprocessor\t: 1\n",
    "proc/meminfo": "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nSwapTotal:       1048576 kB\nSwapFree:         524288 kB\n",
    "proc/sys/vm/max_map_count": "65530\n",
    "proc/sys/fs/aio-nr": "0\n",
    "proc/sys/fs/aio-max-nr": "65536\n",
    "proc/sys/kernel/io_uring_disabled": "0\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/devices/system/node/node0/cpulist": "0-1\n",
    "sys/devices/system/node/possible": "0\n",
    "proc/self/mountinfo": "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n",
}


def root_with(directory: Path, **changes: str | None) -> Path:
    """A root of a machine without fault; ``changes`` are its files by name, slashes written ``__``, and None for one that is missing."""
    files = {**GOOD, **{name.replace("__", "/"): text for name, text in changes.items()}}
    for name, text in files.items():
        if text is not None:
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return directory
