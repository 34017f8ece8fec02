"""Corpora and streams over small texts in tmp_path."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from infinity.data import Batch, BatchStream, Corpus, Loader, Text, open_corpus, sequential_batches
from infinity.errors import DataError


def write(path: Path, text: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


def whole(corpus: Corpus) -> Text:
    return Text(corpus, 0, corpus.nbytes)


def counting(tmp_path: Path, nbytes: int) -> Text:
    """A text whose every window of 2 bytes tells where it is: byte 2i is i // 256, byte 2i + 1 is i % 256."""
    text = b"".join(divmod(i, 256)[0].to_bytes(1, "big") + (i % 256).to_bytes(1, "big") for i in range((nbytes + 1) // 2))
    return whole(open_corpus(write(tmp_path / "text", text[:nbytes])))


def rows(batches: Iterator[Batch]) -> list[bytes]:
    return [bytes(row.tolist()) for tokens, _ in batches for row in tokens]


def equal(left: list[Batch], right: list[Batch]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)


def read(corpus: Corpus) -> bytes:
    tokens, targets = whole(corpus).rows([0], corpus.nbytes - 1)
    return bytes([*tokens[0].tolist(), int(targets[0, -1])])


def test_a_directory_is_its_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name, text in {"b/x": b"3", "a.txt": b"2", "a/z": b"1", "b/y/w": b"4", "empty": b""}.items():
        write(tmp_path / name, text)
    corpus = open_corpus(tmp_path)
    assert corpus.files == ("a/z", "a.txt", "b/x", "b/y/w")
    assert read(corpus) == b"1234"


def test_hidden_files_caches_and_dangling_links_are_left_out(tmp_path: Path) -> None:
    for name in (".git/config", ".hidden", "__pycache__/m.pyc", "kept"):
        write(tmp_path / name, b"text")
    os.symlink(tmp_path / "nothing", tmp_path / "link")
    assert open_corpus(tmp_path).files == ("kept",)


def test_a_read_crosses_files(tmp_path: Path) -> None:
    for name, text in {"a": b"ab", "b": b"c", "c": b"defg"}.items():
        write(tmp_path / name, text)
    tokens, targets = whole(open_corpus(tmp_path)).rows([1], 4)
    assert (bytes(tokens[0].tolist()), bytes(targets[0].tolist())) == (b"bcde", b"cdef")


def test_the_default_is_the_standard_library_without_its_tests() -> None:
    corpus = open_corpus()
    assert corpus.root == sysconfig.get_path("stdlib")
    assert "argparse.py" in corpus.files
    assert not [name for name in corpus.files if {"test", "tests", "site-packages"} & set(Path(name).parts) or not name.endswith(".py")]
    assert corpus.nbytes > 1_000_000


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: No such file or directory\. Check the path"):
        open_corpus(tmp_path / "nowhere")


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty"):
        open_corpus(tmp_path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty"):
        open_corpus(write(tmp_path / "text", b""))


def test_a_device_is_refused() -> None:
    with pytest.raises(DataError, match="neither a file nor a directory"):
        open_corpus("/dev/zero")


def test_a_file_that_became_shorter_is_an_error_and_not_zeros(tmp_path: Path) -> None:
    path = write(tmp_path / "text", b"0123456789")
    text = whole(open_corpus(path))
    path.write_bytes(b"0123")
    with pytest.raises(DataError, match="5 bytes early"):
        text.rows([0], 8)


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "text", b"0123456789")
    text = whole(open_corpus(path))
    path.unlink()
    with pytest.raises(DataError, match=r"text cannot be read: No such file"):
        text.rows([0], 8)


def test_the_held_out_part_is_the_end_and_is_not_trained_on(tmp_path: Path) -> None:
    train, held_out = open_corpus(write(tmp_path / "text", bytes(100))).split(0.1)
    assert (train.begin, train.end, held_out.begin, held_out.end) == (0, 90, 90, 100)
    with pytest.raises(IndexError):
        train.rows([82], 8)


def test_too_little_text_says_how_much_is_needed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"8 bytes .* context of 8 needs at least 9"):
        BatchStream(counting(tmp_path, 8), batch=1, context=8)


def test_the_least_text_that_fits_gives_its_only_window(tmp_path: Path) -> None:
    text = counting(tmp_path, 9)
    stream = BatchStream(text, batch=2, context=8)
    assert equal(list(islice(stream, 1)), [text.rows([0, 0], 8)])


def test_tokens_and_targets_are_int64_and_one_byte_apart(tmp_path: Path) -> None:
    tokens, targets = next(iter(BatchStream(counting(tmp_path, 999), batch=3, context=16)))
    assert tokens.shape == targets.shape == (3, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("nbytes", [33, 64, 65, 1000, 1023, 4097])
def test_an_epoch_takes_each_window_once(tmp_path: Path, nbytes: int) -> None:
    stream = BatchStream(counting(tmp_path, nbytes), batch=1, context=16, seed=3)
    taken = rows(islice(stream, stream.epoch_samples))
    assert len(set(taken)) == stream.epoch_samples == nbytes // 16 - 1


def test_epochs_differ_in_order_and_offset(tmp_path: Path) -> None:
    stream = BatchStream(counting(tmp_path, 3000), batch=1, context=16)
    first, second = rows(islice(stream, stream.epoch_samples)), rows(islice(stream, stream.epoch_samples))
    assert first != sorted(first)
    assert set(first) != set(second)


def test_the_same_seed_gives_the_same_batches_and_another_seed_others(tmp_path: Path) -> None:
    text = counting(tmp_path, 3000)
    first, same, other = (list(islice(BatchStream(text, batch=4, context=16, seed=seed), 5)) for seed in (1, 1, 2))
    assert equal(first, same)
    assert not equal(first, other)


def test_ranks_share_the_batches_of_one_rank(tmp_path: Path) -> None:
    text = counting(tmp_path, 3000)
    alone = rows(islice(BatchStream(text, batch=6, context=16), 4))
    shards = [rows(islice(BatchStream(text, batch=2, context=16, rank=rank, world_size=3), 4)) for rank in range(3)]
    assert alone == [row for step in range(4) for shard in shards for row in shard[2 * step : 2 * step + 2]]


def test_a_resumed_stream_continues_exactly(tmp_path: Path) -> None:
    text = counting(tmp_path, 3000)
    stream = BatchStream(text, batch=4, context=16)
    list(islice(stream, 7))
    resumed = BatchStream(text, batch=4, context=16)
    resumed.load_state_dict(stream.state_dict())
    assert equal(list(islice(stream, 5)), list(islice(resumed, 5)))


def test_a_stream_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    text = counting(tmp_path, 3000)
    stream = BatchStream(text, batch=3, context=16, rank=1, world_size=2)
    list(islice(stream, 5))
    resumed = BatchStream(text, batch=2, context=16)
    resumed.load_state_dict(stream.state_dict())
    alone = BatchStream(text, batch=1, context=16)
    assert rows(islice(resumed, 1)) == rows(islice(alone, 32))[30:]


@pytest.mark.parametrize(("changed", "match"), [({"seed": 9}, "seed was 9 and is 0"), ({"context": 8}, "context"), ({"text": "x"}, "text")])
def test_a_state_of_another_stream_is_refused_and_changes_nothing(tmp_path: Path, changed: dict[str, object], match: str) -> None:
    stream = BatchStream(counting(tmp_path, 3000), batch=4, context=16)
    with pytest.raises(DataError, match=match):
        stream.load_state_dict({**stream.state_dict(), "samples": 4, **changed})  # type: ignore[typeddict-item]
    assert stream.samples == 0


@pytest.mark.parametrize("samples", [-1, True, "3", None])
def test_a_state_that_is_no_count_is_refused(tmp_path: Path, samples: object) -> None:
    stream = BatchStream(counting(tmp_path, 3000), batch=4, context=16)
    with pytest.raises(DataError, match="samples is"):
        stream.load_state_dict({**stream.state_dict(), "samples": samples})  # type: ignore[typeddict-item]


def test_loader_workers_give_the_batches_of_no_workers(tmp_path: Path) -> None:
    text = counting(tmp_path, 3000)
    loader = DataLoader(BatchStream(text, batch=4, context=16), batch_size=None, num_workers=2)
    assert equal(list(islice(loader, 7)), list(islice(BatchStream(text, batch=4, context=16), 7)))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_a_loader_counts_what_was_handed_out(tmp_path: Path, workers: int) -> None:
    text = counting(tmp_path, 3000)
    loader = Loader(BatchStream(text, batch=4, context=16), workers=workers)
    list(islice(loader, 3))
    assert loader.state_dict()["samples"] == 12
    resumed = Loader(BatchStream(text, batch=4, context=16), workers=workers)
    resumed.load_state_dict(loader.state_dict())
    assert equal(list(islice(resumed, 2)), list(islice(BatchStream(text, batch=4, context=16), 5))[3:])


def test_sequential_batches_cover_a_text_in_order(tmp_path: Path) -> None:
    text = counting(tmp_path, 16 * 6 + 1)
    assert equal(list(sequential_batches(text, batch=3, context=16)), [text.rows([0, 16, 32], 16), text.rows([48, 64, 80], 16)])


def test_a_limit_spreads_sequential_batches_over_the_text(tmp_path: Path) -> None:
    text = counting(tmp_path, 16 * 8 + 1)
    assert equal(list(sequential_batches(text, batch=2, context=16, limit=2)), [text.rows([0, 32], 16), text.rows([64, 96], 16)])


def test_a_short_text_is_one_smaller_sequential_batch(tmp_path: Path) -> None:
    text = counting(tmp_path, 33)
    assert equal(list(sequential_batches(text, batch=8, context=16)), [text.rows([0, 16], 16)])


def test_sequential_batches_refuse_too_little_text_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too little text"):
        sequential_batches(counting(tmp_path, 16), batch=8, context=16)
