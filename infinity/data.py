"""Text as bytes, and seeded batches of it that any number of ranks share and that can be resumed.

A corpus is files one after another, in a fixed order; nothing of it is kept in memory. What a batch holds is a function of (seed,
number of the sample), so a stream's whole state is one count, the same on every rank, and a resumed stream continues exactly, also on
another number of ranks or with another batch. Nothing here knows the engine.

An epoch cuts the text into windows of ``context`` bytes, from an offset of the epoch's own, and takes each window once, over all
ranks, in an order of the epoch's own.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from infinity.errors import DataError

Batch = tuple[Tensor, Tensor]
"""(tokens, targets): int64, (batch, context) each; targets are the tokens one byte later."""

HELD_OUT_FRACTION = 0.05

_SKIPPED_DIRS = frozenset({"__pycache__"})
_SKIPPED_STDLIB_DIRS = _SKIPPED_DIRS | {"site-packages", "dist-packages", "test", "tests"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files as one array of bytes.

    Memory: none of the text; a file is opened for each read, so a corpus can be pickled, forked and shared between threads.
    """

    root: str
    files: tuple[str, ...]
    """Paths below ``root``, in order; "" where the corpus is one file."""
    begins: tuple[int, ...]
    """Where each file starts, and at last the bytes of all."""
    fingerprint: str = field(repr=False)
    """Of names and sizes: a stream is resumed only on the text that it was made for."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return self.begins[-1]

    def read_into(self, begin: int, out: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Fill ``out`` with the bytes from ``begin`` on.

        Errors: DataError names a file that cannot be read or has become shorter.
        """
        if not 0 <= begin <= begin + out.size <= self.nbytes:
            raise IndexError(f"bytes {begin} to {begin + out.size} of a corpus of {self.nbytes}")
        done = 0
        index = bisect_right(self.begins, begin) - 1
        while done < out.size:
            offset = begin + done - self.begins[index]
            nbytes = min(out.size - done, self.begins[index + 1] - self.begins[index] - offset)
            self._read_file(index, offset, out[done : done + nbytes].data)
            done += nbytes
            index += 1

    def split(self, held_out: float = HELD_OUT_FRACTION) -> tuple[Text, Text]:
        """(text to train on, text held out): the last part of the corpus, ``held_out`` of its bytes, is never trained on."""
        if not 0 <= held_out <= 1:
            raise DataError(f"the part held out is {held_out}: it must be between 0 and 1")
        cut = self.nbytes - int(self.nbytes * held_out)
        return Text(self, 0, cut), Text(self, cut, self.nbytes)

    def _read_file(self, index: int, offset: int, out: memoryview) -> None:
        path = os.path.join(self.root, self.files[index]) if self.files[index] else self.root
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(offset)
                done = 0
                while done < len(out):
                    count = file.readinto(out[done:])
                    if not count:
                        raise DataError(f"{path} ended {len(out) - done} bytes early: it has become shorter since the start. Start again.")
                    done += count
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}. Check the file and its permissions.") from error


@dataclass(frozen=True, slots=True)
class Text:
    """The bytes [begin, end) of a corpus."""

    corpus: Corpus
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.end - self.begin

    def rows(self, begins: Sequence[int], context: int) -> Batch:
        """One row of ``context`` tokens from each of ``begins``, counted from the start of this text."""
        text = np.empty((len(begins), context + 1), np.uint8)
        for row, begin in zip(text, begins, strict=True):
            if not 0 <= begin <= self.nbytes - context - 1:
                raise IndexError(f"{context + 1} bytes from {begin} on, of a text of {self.nbytes}")
            self.corpus.read_into(self.begin + begin, row)
        tokens = torch.from_numpy(text).to(torch.int64)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def open_corpus(path: str | os.PathLike[str] | None = None) -> Corpus:
    """A file, all files below a directory, or (None) the Python sources of this interpreter's standard library.

    Order: by path. Directories named ``__pycache__``, whatever starts with a dot, and what is no regular file are left out; of the
    standard library also its tests, which not every machine has.
    Errors: DataError where there is nothing to read.
    """
    if path is None:
        root = sysconfig.get_path("stdlib")
        files = _find_files(root, suffix=".py", skipped=_SKIPPED_STDLIB_DIRS) if os.path.isdir(root) else []
        if not files:
            raise DataError(f"no Python sources of the standard library below {root}. Give a file or directory of text instead.")
        return _corpus(root, files)
    root = os.path.abspath(os.path.expanduser(path))
    try:
        status = os.stat(root)
    except OSError as error:
        hint = "Check the path." if error.errno == errno.ENOENT else "Check its permissions."
        raise DataError(f"text {root}: {error.strerror}. {hint}") from error
    if stat.S_ISREG(status.st_mode):
        return _corpus(root, [("", status.st_size)])
    if not stat.S_ISDIR(status.st_mode):
        raise DataError(f"text {root} is neither a file nor a directory")
    return _corpus(root, _find_files(root, suffix="", skipped=_SKIPPED_DIRS))


class StreamState(TypedDict):
    """All that a stream needs to continue; plain values, equal on all ranks."""

    samples: int
    seed: int
    context: int
    text: str


class BatchStream(IterableDataset[Batch]):
    """Batches without end; iterating continues where the stream stands, and the state says where that is.

    A batch counts as taken when it is handed out. In a torch ``DataLoader`` (``batch_size=None``) its workers share the batches out, in
    the same order as without workers; they read ahead in copies of the stream, so take the state from :class:`Loader`, which counts
    what was handed out.
    """

    def __init__(self, text: Text, *, batch: int, context: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        if batch < 1 or context < 1:
            raise DataError(f"batch is {batch} and context {context}: both must be at least 1")
        if not 0 <= rank < world_size:
            raise DataError(f"rank {rank} of world_size {world_size}: it must be at least 0 and below world_size")
        _check_enough(text, context)
        self.text = text
        self.batch = batch
        self.context = context
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.samples = 0
        """Taken so far, by all ranks together."""

    @property
    def epoch_samples(self) -> int:
        """Windows of an epoch."""
        return max(1, self.text.nbytes // self.context - 1)

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        if worker is None:
            while True:
                samples = self.samples
                self.advance()
                yield self.batch_at(samples)
        samples = self.samples + worker.id * self._stride
        while True:
            yield self.batch_at(samples)
            samples += worker.num_workers * self._stride

    def advance(self) -> None:
        """Count one batch of each rank as taken."""
        self.samples += self._stride

    def batch_at(self, samples: int) -> Batch:
        """This rank's batch after ``samples`` samples; needs no state."""
        first = samples + self.rank * self.batch
        return self.text.rows([self._window(first + row) for row in range(self.batch)], self.context)

    def state_dict(self) -> StreamState:
        """Where the stream stands."""
        return {"samples": self.samples, "seed": self.seed, "context": self.context, "text": self._text_id}

    def load_state_dict(self, state: StreamState) -> None:
        """Continue from ``state``; the number of ranks and the batch may differ from those it was taken with.

        Errors: DataError names what else differs: seed, context or text. The stream is then as it was.
        """
        own = self.state_dict()
        differs = [f"{key} was {state.get(key)!r} and is {own[key]!r}" for key in ("seed", "context", "text") if state.get(key) != own[key]]
        if differs:
            raise DataError("the stream cannot continue from this state: " + "; ".join(differs) + ". Use what the state was taken with.")
        samples = state.get("samples")
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
            raise DataError(f"the stream cannot continue from this state: samples is {samples!r}")
        self.samples = samples

    @property
    def _stride(self) -> int:
        return self.batch * self.world_size

    @property
    def _text_id(self) -> str:
        return f"{self.text.corpus.fingerprint}:{self.text.begin}-{self.text.end}"

    def _window(self, sample: int) -> int:
        """Where a sample begins in the text."""
        n = self.epoch_samples
        epoch, index = divmod(sample, n)
        key = int.from_bytes(hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=16).digest(), "little")
        offset = (key >> 64) % min(self.context, self.text.nbytes - n * self.context)
        return offset + _permuted(index, n, key & _MASK64) * self.context


class Loader:
    """A stream read by ``workers`` processes of a torch ``DataLoader``, or by this one (0), with the state of what was handed out."""

    def __init__(self, stream: BatchStream, *, workers: int = 0) -> None:
        self.stream = stream
        self.workers = workers

    def __iter__(self) -> Iterator[Batch]:
        if not self.workers:
            yield from self.stream
        for batch in DataLoader(self.stream, batch_size=None, num_workers=self.workers):
            self.stream.advance()
            yield batch

    def state_dict(self) -> StreamState:
        """Where the stream stands; batches read ahead do not count."""
        return self.stream.state_dict()

    def load_state_dict(self, state: StreamState) -> None:
        """As :meth:`BatchStream.load_state_dict`; takes effect at the next ``iter``."""
        self.stream.load_state_dict(state)


def sequential_batches(text: Text, *, batch: int, context: int, limit: int | None = None) -> Iterator[Batch]:
    """Windows of a text in order, each once, for evaluation: at most ``limit`` full batches, spread over the whole text.

    A text of fewer windows than ``batch`` is one smaller batch.
    Errors: DataError, at once, where the text is shorter than one window.
    """
    _check_enough(text, context)
    if batch < 1:
        raise DataError(f"batch is {batch}: it must be at least 1")
    n_windows = (text.nbytes - 1) // context
    batch = min(batch, n_windows)
    n_batches = n_windows // batch
    if limit is not None:
        n_batches = min(n_batches, limit)
    n_rows = n_batches * batch
    begins = [row * n_windows // n_rows * context for row in range(n_rows)]
    return (text.rows(begins[first : first + batch], context) for first in range(0, n_rows, batch))


def _corpus(root: str, files: Sequence[tuple[str, int]]) -> Corpus:
    files = [(name, nbytes) for name, nbytes in files if nbytes]
    if not files:
        raise DataError(f"text {root} is empty. Give a file or directory of text.")
    digest = hashlib.blake2b(digest_size=8)
    for name, nbytes in files:
        digest.update(os.fsencode(name) + b"\0" + str(nbytes).encode() + b"\0")
    begins = tuple(accumulate((nbytes for _, nbytes in files), initial=0))
    return Corpus(root, tuple(name for name, _ in files), begins, digest.hexdigest())


def _find_files(root: str, suffix: str, skipped: frozenset[str]) -> list[tuple[str, int]]:
    """(path below root, bytes) of regular files, by path."""

    def fail(error: OSError) -> None:
        raise DataError(f"directory {error.filename} cannot be read: {error.strerror}. Check its permissions.") from error

    found = []
    for directory, names, files in os.walk(root, onerror=fail):
        names[:] = [name for name in names if name not in skipped and not name.startswith(".")]
        for name in files:
            if name.endswith(suffix) and not name.startswith("."):
                path = os.path.join(directory, name)
                try:
                    status = os.stat(path)
                except FileNotFoundError:  # a link to nothing
                    continue
                if stat.S_ISREG(status.st_mode):
                    found.append((os.path.relpath(path, root), status.st_size))
    return sorted(found, key=lambda file: Path(file[0]).parts)


def _check_enough(text: Text, context: int) -> None:
    if text.nbytes < context + 1:
        raise DataError(
            f"{text.corpus.root} is too little text ({text.nbytes} bytes of it in one part): "
            f"a context of {context} needs at least {context + 1} bytes "
            "for training and as many held out. Give more text, or a shorter context."
        )


_MASK64 = (1 << 64) - 1


def _permuted(index: int, n: int, key: int) -> int:
    """Where ``index`` goes in a permutation of range(n) that ``key`` chooses; needs no memory.

    Source: a balanced Feistel network over the next power of four, walked until it falls into the range (Black, Rogaway, 2002).
    """
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for turn in range(6):
            left, right = right, left ^ (_mixed(key + (turn << 56) + right) & mask)
        index = left << half_bits | right
        if index < n:
            return index


def _mixed(x: int) -> int:
    """64 bits that depend on all bits of x. Source: splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK64
    return x ^ x >> 31
