"""A dict of tensors to a safetensors file and back, at the speed of the drive.

[Note: how a file is written]
The header is padded to whole pages, so the tensors' bytes begin at one. They follow each other without a hole, as the format demands, so
most tensors begin inside a page. The whole pages of a large tensor are written from where it lies; everything between them - the ends of
large tensors, small ones, tensors that are not contiguous or not in host memory - is gathered into pieces that begin and end at pages. So
all but the last bytes of the file goes past the page cache, in several requests at once, and no copy of more than a few pieces is made.

The file gets its name when it is whole and on the drive: whatever fails before leaves what was there.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import secrets
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from infinity.errors import ArrayError, InfinityError, IoError, SafetensorsError
from infinity.io.arrays import empty, memory_of
from infinity.io.file import File, open_file
from infinity.io.futures import Future, wait
from infinity.io.header import LENGTH_NBYTES, Entry, format_header, header_nbytes, parse_header
from infinity.io.queue import GRAIN_NBYTES, Queue, default_queue
from infinity.sizes import align_down

__all__ = ["load", "save"]

DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F4": torch.float4_e2m1fn_x2,
    "BOOL": torch.bool,
}
"""By the format's names, in the order in which the library of that name writes them: the widest first, so that all lie at multiples of
their width. One element of torch's F4 is two of the format's, along the last dimension."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}

_PIECE_NBYTES = 8 << 20
_PIECES = 4
_LARGE_NBYTES = 1 << 20
_RUN_NBYTES = 256 << 20
_TOUCH_NBYTES = 32 << 20


def save(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    queue: Queue | None = None,
) -> None:
    """Write tensors, by name, to a safetensors file: when this returns it is on the drive, whole, and under its name.

    Tensors of any dtype that the format has, shape, stride and device; those that share memory are written one by one.
    Memory: 32 MiB beside the tensors, and the queue's.
    Errors: SafetensorsError, ArrayError, SpaceError, IoError; an older file of that name is then left as it was.
    """
    queue = default_queue() if queue is None else queue
    target = os.path.realpath(path)
    for name, tensor in tensors.items():
        _check(name, tensor, target)
    ordered = sorted(tensors.items(), key=lambda item: (_RANKS[item[1].dtype], item[0]))
    header, data_nbytes = format_header(
        ((name, _NAMES[tensor.dtype], _shape_in_file(tensor)) for name, tensor in ordered), metadata, GRAIN_NBYTES, target
    )
    with _replacing(target, queue) as temporary, open_file(temporary, "w", queue=queue) as file:
        file.reserve(len(header) + data_nbytes)
        writer = _Writer(file)
        writer.gather(np.frombuffer(header, np.uint8))
        for _, tensor in ordered:
            if _is_plain(tensor):
                writer.put(_bytes_of(tensor))
            else:
                for part in _parts(tensor, _PIECE_NBYTES):
                    writer.gather(_bytes_of(part))
        writer.finish()
        file.flush().wait()


def load(
    path: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    device: str | torch.device = "cpu",
    *,
    queue: Queue | None = None,
) -> dict[str, torch.Tensor]:
    """Read the tensors of these names (all, by default) from a safetensors file.

    Memory: tensors that lie next to each other in the file share a mapping of about 256 MiB, or of one tensor if that is larger; it goes
        with the last of them. For another device two of those are in host memory at a time.
    Errors: SafetensorsError says what is wrong with the file, or that a name is not in it; IoError.
    """
    place = torch.device(device)
    with open_file(path, queue=queue) as file:
        start, entries = _read_header(file)
        if names is not None:
            entries = _chosen(entries, names, file.path)
        for name, entry in entries.items():
            _form(name, entry, file.path)
        reading: deque[tuple[dict[str, Entry], NDArray[np.uint8], list[Future]]] = deque()
        tensors: dict[str, torch.Tensor] = {}
        for run in _runs(entries):
            reading.append((run, *_read(file, start, run)))
            if place.type != "cpu" and len(reading) == 2:
                tensors.update(_land(*reading.popleft(), file.path, place))
        while reading:
            tensors.update(_land(*reading.popleft(), file.path, place))
    return tensors


# -- saving


def _check(name: str, tensor: torch.Tensor, path: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArrayError(f"tensor {name!r}: a {type(tensor).__name__} is no torch.Tensor. Take torch.as_tensor.")
    if tensor.dtype not in _NAMES:
        raise SafetensorsError("unknown_dtype", path, f"the format has no {tensor.dtype}", name)
    if tensor.dtype is torch.float4_e2m1fn_x2 and tensor.ndim == 0:
        raise SafetensorsError("bad_shape", path, f"a single {tensor.dtype} is two of the format's, and has no dimension for them", name)
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ArrayError(f"tensor {name!r} has no bytes of its own ({tensor.device}, {tensor.layout}). Take its dense values.")
    if _is_plain(tensor):
        try:
            memory_of(tensor, writable=False)
        except ArrayError as error:
            raise ArrayError(f"tensor {name!r}: {error}") from None


def _shape_in_file(tensor: torch.Tensor) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    return (*shape[:-1], 2 * shape[-1]) if tensor.dtype is torch.float4_e2m1fn_x2 else shape


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    if tensor.numel() == 0:  # which may have strides that no view takes
        return np.empty(0, np.uint8)
    found: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found


def _parts(tensor: torch.Tensor, nbytes_max: int) -> Iterator[torch.Tensor]:
    """Contiguous copies in host memory, of at most so many bytes each, in the order of the elements."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= nbytes_max:
        yield tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        return
    rows = max(1, nbytes_max // (nbytes // tensor.shape[0]))
    for begin in range(0, tensor.shape[0], rows):
        yield from _parts(tensor[begin : begin + rows] if rows > 1 else tensor[begin], nbytes_max)


class _Writer:
    """Bytes one behind the other, from the start of a file on.

    Invariant: what is gathered begins at a page of the file.
    Memory: owns its pieces; what is put must stay until `finish`.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        self._at = 0
        self._gathered = 0
        self._pieces: deque[tuple[NDArray[np.uint8], Future | None]] = deque((empty(_PIECE_NBYTES), None) for _ in range(_PIECES))
        self._futures: list[Future] = []

    def gather(self, source: NDArray[np.uint8]) -> None:
        """Copies."""
        while len(source):
            piece, future = self._pieces[0]
            if future is not None:
                future.wait()
                self._pieces[0] = (piece, None)
            room = piece[self._gathered : self._gathered + len(source)]
            room[:] = source[: len(room)]
            source = source[len(room) :]
            self._gathered += len(room)
            if self._gathered == len(piece):
                self._write_gathered()

    def put(self, source: NDArray[np.uint8]) -> None:
        """Writes the whole pages of a large source from where it lies."""
        head = -(self._at + self._gathered) % GRAIN_NBYTES
        body = align_down(len(source) - head, GRAIN_NBYTES)
        if body < _LARGE_NBYTES:
            self.gather(source)
            return
        self.gather(source[:head])
        self._write_gathered()
        self._futures.append(self._file.write_from(source[head : head + body], self._at))
        self._at += body
        self.gather(source[head + body :])

    def finish(self) -> None:
        """Until everything is written."""
        self._write_gathered()
        wait([*self._futures, *(future for _, future in self._pieces if future is not None)])

    def _write_gathered(self) -> None:
        if self._gathered:
            piece, _ = self._pieces.popleft()
            self._pieces.append((piece, self._file.write_from(piece, self._at, self._gathered)))
            self._at += self._gathered
            self._gathered = 0


@contextlib.contextmanager
def _replacing(target: str, queue: Queue) -> Iterator[str]:
    """A name to write to, which becomes ``target`` when that went well, and goes when it did not."""
    directory = os.path.dirname(target)
    temporary = os.path.join(directory, f".infinity-{os.getpid()}-{secrets.token_hex(8)}.tmp")
    files = queue.files
    op = "write"
    try:
        yield temporary
        op = "chmod"
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
        op = "rename"
        files.rename(temporary, target)
        op = "sync"
        fd = files.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            files.sync(fd)
        finally:
            files.close(fd)
    except BaseException as error:
        with contextlib.suppress(OSError):
            files.unlink(temporary)
        if isinstance(error, OSError) and not isinstance(error, InfinityError):
            raise IoError(op, target, 0, 0, error.errno or errno.EIO) from error
        raise


# -- loading


def _read_header(file: File) -> tuple[int, dict[str, Entry]]:
    """Where the tensors' bytes begin, and the tensors in the order of their bytes."""
    file_nbytes = file.nbytes
    first = bytearray(min(LENGTH_NBYTES, file_nbytes))
    file.read_into(first).wait()
    raw = bytearray(header_nbytes(first, file_nbytes, file.path))
    file.read_into(raw, LENGTH_NBYTES).wait()
    start = LENGTH_NBYTES + len(raw)
    return start, parse_header(bytes(raw), file_nbytes - start, file.path)[0]


def _chosen(entries: dict[str, Entry], names: Iterable[str], path: str) -> dict[str, Entry]:
    wanted = {names} if isinstance(names, str) else set(names)
    for name in sorted(wanted - entries.keys(), key=str):
        near = difflib.get_close_matches(str(name), entries, 1)
        raise SafetensorsError("unknown_name", path, f"is not in the file{f'. Did you mean {near[0]!r}?' if near else ''}", name)
    return {name: entry for name, entry in entries.items() if name in wanted}


def _runs(entries: dict[str, Entry]) -> Iterator[dict[str, Entry]]:
    """Neighbours in the file that are read as one."""
    run: dict[str, Entry] = {}
    begin = end = 0
    for name, entry in entries.items():
        if run and (entry.begin != end or entry.end - begin > _RUN_NBYTES):
            yield run
            run = {}
        if not run:
            begin = entry.begin
        run[name] = entry
        end = entry.end
    if run:
        yield run


def _read(file: File, start: int, run: dict[str, Entry]) -> tuple[NDArray[np.uint8], list[Future]]:
    """Memory that lies to pages as the file does, and the reads into it."""
    spans = list(run.values())
    offset, nbytes = start + spans[0].begin, spans[-1].end - spans[0].begin
    skip = offset % GRAIN_NBYTES
    memory: NDArray[np.uint8] = empty(skip + nbytes)[skip:]
    futures = []
    for begin in range(-skip, nbytes, _TOUCH_NBYTES):
        piece = memory[max(begin, 0) : begin + _TOUCH_NBYTES]
        piece[::GRAIN_NBYTES] = 0  # the kernel clears new pages here, while it reads into those before, and not between two reads
        futures.append(file.read_into(piece, offset + max(begin, 0)))
    return memory, futures


def _land(
    run: dict[str, Entry], memory: NDArray[np.uint8], futures: list[Future], path: str, place: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    wait(futures)
    origin = next(iter(run.values())).begin
    for name, entry in run.items():
        yield name, _tensor(name, entry, memory[entry.begin - origin : entry.end - origin], path).to(place)


def _form(name: str, entry: Entry, path: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """What torch makes of it."""
    if entry.dtype not in DTYPES:
        raise SafetensorsError("unknown_dtype", path, f"torch has no {entry.dtype}", name)
    shape = entry.shape
    if entry.dtype == "F4":
        if not shape or shape[-1] % 2:
            raise SafetensorsError("bad_shape", path, f"torch has no F4 of shape {shape}: its last dimension must be even", name)
        shape = (*shape[:-1], shape[-1] // 2)
    return DTYPES[entry.dtype], shape


def _tensor(name: str, entry: Entry, memory: NDArray[np.uint8], path: str) -> torch.Tensor:
    dtype, shape = _form(name, entry, path)
    if len(memory) == 0:
        return torch.empty(shape, dtype=dtype)
    if memory.ctypes.data % dtype.itemsize:
        memory = memory.copy()
    return torch.from_numpy(memory).view(dtype).view(shape)
