"""A directory that is to hold pages: its file system, its drive, and what can be done there."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import secrets
import struct
from pathlib import Path

from infinity.doctor.rows import Row, Status, guarded, notice, ok, problem, read_text
from infinity.sizes import align_up, format_bytes
from infinity.tiers.mounts import Mount, mount_of, parse_mounts

FREE_WANTED_NBYTES = 1 << 30
_DIRECT_NBYTES = 4096
_ALIGNMENT_UNKNOWN = 4096
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})
_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "afs", "orangefs"}
)
_COPYING_FILE_SYSTEMS = frozenset({"btrfs", "zfs", "bcachefs"})


def path_rows(path: Path, root: Path) -> list[Row]:
    """What a directory for pages is like; where it is missing, that is all there is to say."""
    written = guarded("directory", lambda: writable_row(path))
    if not path.is_dir():
        return [written]
    real = os.path.realpath(path)
    mount = mount_of(real, parse_mounts(read_text(root, "proc/self/mountinfo") or ""))
    return [
        written,
        guarded("file system", lambda: file_system_row(mount)),
        guarded("device", lambda: device_row(mount, root)),
        guarded("O_DIRECT", lambda: direct_row(real, writable=written.status is Status.OK)),
        guarded("free space", lambda: space_row(os.statvfs(real))),
        guarded("inodes", lambda: inodes_row(os.statvfs(real))),
        guarded("disk quota", lambda: quota_row(mount)),
        guarded("leftovers", lambda: leftovers_row(real)),
    ]


def writable_row(path: Path) -> Row:
    from infinity.tiers.nvme_path import check_path

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
            "ext4 or xfs is faster for pages that are written over and over (on btrfs they are asked to be overwritten in place).",
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
    virtual = any(part.startswith("virtio") for part in disk.parts)
    kind = {"0": "solid state", "1": "rotating"}.get(rotational or "", "kind not told")
    told = [
        f"model {model}" if model else "model not told",
        "virtual" if virtual else kind,
        f"scheduler {scheduler[1]}" if scheduler else "no scheduler",
    ]
    value = f"{node.name}: {', '.join(told)}" + (f", made of {', '.join(parts)}" if parts else "")
    turns = rotational == "1" and not virtual
    facts = {"device": node.name, "model": model, "rotational": turns, "scheduler": scheduler[1] if scheduler else None}
    if turns:  # a virtual drive says that it turns where nobody told it otherwise
        remedy = "Name a directory on an SSD: a disk that turns gives some 200 MB/s."
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
            with mmap.mmap(-1, nbytes) as there, mmap.mmap(-1, nbytes) as back:
                there[:] = secrets.token_bytes(nbytes)
                whole = os.pwrite(fd, there, 0) == os.preadv(fd, [back], 0) == nbytes and there[:] == back[:]
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
    said = "" if told else " (the kernel does not say more)"
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
    from infinity.tiers.nvme_path import find_leftovers

    found = find_leftovers(directory)
    if not found:
        return ok("leftovers", "none", directories=[])
    listed = ", ".join(os.path.basename(path) for path in found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    remedy = "Nothing need be done: the next run here removes them."
    return notice("leftovers", f"{len(found)} of runs that are dead: {listed}", remedy, directories=found)
