"""Tensors to a safetensors file and back, against the library of that name; saves that fail."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

import infinity.io
from infinity.errors import ArrayError, IoError, SafetensorsError, SpaceError
from infinity.faults import Fault
from infinity.io import Queue
from infinity.io import safetensors as module
from infinity.io.queue import GRAIN_NBYTES
from infinity.task_queue import FileOp
from tests.support.files import bytes_of, direct_works

library = pytest.importorskip("safetensors.torch", reason="the safetensors library is not installed")
safe_open = pytest.importorskip("safetensors").safe_open


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    numel = max(1, torch.Size(shape).numel())
    bytes_ = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return bytes_.view(dtype)[: torch.Size(shape).numel()].reshape(shape)


def every_kind() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    base = torch.randn(700, 900)
    tensors = {f"dtype {name}": random(dtype, 5, 7) for name, dtype in module.DTYPES.items()}
    tensors.update(
        {f"large {name}": random(dtype, 3, 500_001) for name, dtype in module.DTYPES.items() if name in ("F32", "BF16", "BOOL", "F4")}
    )
    tensors.update(
        {
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4, dtype=torch.float16),
            "no rows": torch.empty(4, 0),
            "empty of numpy's": torch.from_numpy(np.ones(0)),
            "transposed": base.t(),
            "strided": torch.randn(4_400_000)[::2],
            "expanded": torch.randn(3, 1).expand(3, 750_000),
            "view": base[100:200],
            "shared": base,
            "conjugate": torch.randn(1000, dtype=torch.complex64).conj(),
            "negative": torch.randn(1000, dtype=torch.complex64).conj().imag,
            "parameter": torch.nn.Parameter(torch.randn(100)),
            "aligned": infinity.io.empty((2 << 20) + 5, torch.float32).normal_(),
            "é 名": torch.ones(3),
        }
    )
    return tensors


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().clone()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bytes_of(plain(found[name])) == bytes_of(plain(tensor)), name


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


def test_what_is_saved_is_loaded_here_and_by_the_library(directory: Path, queue: Queue) -> None:
    tensors = every_kind()
    path = directory / "a.safetensors"
    infinity.io.save(tensors, path, {"format": "pt", "é": "ü"}, queue=queue)
    assert_same(infinity.io.load(path, queue=queue), tensors)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "é": "ü"}
        assert_same({name: file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118 - not a dict
    assert leftovers(directory) == []


def test_what_the_library_saves_is_loaded(directory: Path, queue: Queue) -> None:
    tensors = {name: plain(tensor) for name, tensor in every_kind().items()}
    path = directory / "a.safetensors"
    library.save_file(tensors, path, {"format": "pt"})
    assert_same(infinity.io.load(path, queue=queue), tensors)


def test_but_for_the_padding_the_file_is_the_one_that_the_library_writes(directory: Path, one_queue: Queue) -> None:
    tensors = {name: plain(tensor) for name, tensor in every_kind().items()}
    ours, theirs = directory / "ours", directory / "theirs"
    infinity.io.save(tensors, ours, {"format": "pt"}, queue=one_queue)
    library.save_file(tensors, theirs, {"format": "pt"})
    parts = []
    for raw in (ours.read_bytes(), theirs.read_bytes()):
        header_nbytes = int.from_bytes(raw[:8], "little")
        parts.append((raw[8 : 8 + header_nbytes].rstrip(b" "), raw[8 + header_nbytes :]))
    assert parts[0] == parts[1]


def test_the_tensors_begin_at_a_page(one_queue: Queue, tmp_path: Path) -> None:
    for n in (0, 1, 100, 1000):
        infinity.io.save({f"tensor {i}": torch.ones(3) for i in range(n)}, tmp_path / "a", queue=one_queue)
        first = (tmp_path / "a").read_bytes()[:8]
        assert (8 + int.from_bytes(first, "little")) % GRAIN_NBYTES == 0
        assert len(infinity.io.load(tmp_path / "a", queue=one_queue)) == n


def test_some_names_are_read_and_no_more(one_queue: Queue, tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(100_000) for i in range(10)}
    infinity.io.save(tensors, tmp_path / "a", queue=one_queue)
    before = one_queue._queue.stats().read_nbytes
    chosen = infinity.io.load(tmp_path / "a", ["t3", "t7", "t4"], queue=one_queue)
    assert_same(chosen, {name: tensors[name] for name in ("t3", "t4", "t7")})
    assert one_queue._queue.stats().read_nbytes - before < 4 * 400_000
    assert infinity.io.load(tmp_path / "a", [], queue=one_queue) == {}
    with pytest.raises(SafetensorsError, match="Did you mean 't3'") as caught:
        infinity.io.load(tmp_path / "a", ["t33"], queue=one_queue)
    assert (caught.value.problem, caught.value.name) == ("unknown_name", "t33")


def test_large_files_are_read_in_runs_that_go_one_by_one(one_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RUN_NBYTES", 1 << 20)
    tensors = {f"t{i}": torch.randn(100_000 * (1 + i % 7)) for i in range(30)}
    infinity.io.save(tensors, tmp_path / "a", queue=one_queue)
    found = infinity.io.load(tmp_path / "a", queue=one_queue)
    assert_same(found, tensors)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found.values())


def test_another_device_gets_the_tensors_run_by_run(one_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RUN_NBYTES", 1 << 20)
    infinity.io.save({f"t{i}": torch.randn(300_000) for i in range(8)}, tmp_path / "a", queue=one_queue)
    found = infinity.io.load(tmp_path / "a", device="meta", queue=one_queue)
    assert {(tensor.device.type, tensor.shape) for tensor in found.values()} == {("meta", torch.Size([300_000]))}


@pytest.mark.cuda
def test_tensors_come_from_and_go_to_a_gpu(one_queue: Queue, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    tensors = {name: plain(tensor).cuda() for name, tensor in every_kind().items()}
    infinity.io.save(tensors, tmp_path / "a", queue=one_queue)
    found = infinity.io.load(tmp_path / "a", device="cuda", queue=one_queue)
    assert all(tensor.is_cuda for tensor in found.values())
    assert_same({name: tensor.cpu() for name, tensor in found.items()}, {name: tensor.cpu() for name, tensor in tensors.items()})


def test_tensors_that_begin_between_elements_are_loaded(one_queue: Queue, tmp_path: Path) -> None:
    values = torch.randn(1000)
    header = {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}, "b": {"dtype": "F32", "shape": [1000], "data_offsets": [3, 4003]}}
    raw = json.dumps(header).encode()
    (tmp_path / "a").write_bytes(len(raw).to_bytes(8, "little") + raw + b"abc" + values.numpy().tobytes())
    found = infinity.io.load(tmp_path / "a", queue=one_queue)
    assert torch.equal(found["b"], values)
    assert found["b"].data_ptr() % 4 == 0


@pytest.mark.parametrize(("dtype", "shape", "problem"), [("F6_E2M3", [4], "unknown_dtype"), ("F4", [2, 3, 1], "bad_shape")])
def test_what_torch_does_not_have_is_refused_before_anything_is_read(
    one_queue: Queue, tmp_path: Path, dtype: str, shape: list[int], problem: str
) -> None:
    raw = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 3]}}).encode()
    (tmp_path / "a").write_bytes(len(raw).to_bytes(8, "little") + raw + b"abc")
    with pytest.raises(SafetensorsError) as caught:
        infinity.io.load(tmp_path / "a", queue=one_queue)
    assert (caught.value.problem, caught.value.name) == (problem, "a")


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1])
def test_a_file_cut_short_is_a_typed_error(one_queue: Queue, tmp_path: Path, keep: int) -> None:
    infinity.io.save({"a": torch.ones(1000)}, tmp_path / "a", queue=one_queue)
    raw = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(raw[:keep])
    with pytest.raises(SafetensorsError):
        infinity.io.load(tmp_path / "a", queue=one_queue)


def test_a_file_that_is_not_there_is_an_io_error(one_queue: Queue, tmp_path: Path) -> None:
    with pytest.raises(IoError) as caught:
        infinity.io.load(tmp_path / "a", queue=one_queue)
    assert caught.value.errno == errno.ENOENT


def released() -> torch.Tensor:
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (torch.zeros(3, dtype=torch.complex128), SafetensorsError),
        (torch.zeros(3, device="meta"), ArrayError),
        (torch.zeros(3, 3).to_sparse(), ArrayError),
        (released(), ArrayError),
        ([1.0], ArrayError),
        (torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)[0], SafetensorsError),
    ],
)
def test_a_tensor_without_bytes_of_its_own_is_refused_by_name_and_the_old_file_stays(
    one_queue: Queue, tmp_path: Path, tensor: torch.Tensor, error: type[Exception]
) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(error, match="'bad'"):
        infinity.io.save({"good": torch.ones(3), "bad": tensor}, tmp_path / "a", queue=one_queue)
    assert (tmp_path / "a").read_bytes() == b"old"
    assert leftovers(tmp_path) == []


# ---- whole or not at all ----


@pytest.mark.parametrize("op", [FileOp.OPEN, FileOp.FALLOCATE, FileOp.WRITE, FileOp.DATASYNC, FileOp.CLOSE, FileOp.RENAME, FileOp.SYNC])
def test_a_save_that_fails_leaves_the_old_file_or_the_new_one_whole(queue: Queue, tmp_path: Path, op: FileOp) -> None:
    path = tmp_path / "a"
    old, new = {"a": torch.randn(1000)}, {"a": torch.randn(1000), "b": torch.randn(600_001)}
    descriptors = set(os.listdir("/proc/self/fd"))
    for code in (errno.EIO, errno.ENOSPC):
        errors: list[IoError | SpaceError] = []
        for nth in range(1, 100):
            infinity.io.save(old, path, queue=queue)
            renames = queue.files.count(FileOp.RENAME)
            queue.files.fault(op, Fault.error(code), nth=nth)
            try:
                infinity.io.save(new, path, queue=queue)
            except (IoError, SpaceError) as error:
                errors.append(error)
            else:
                break
            finally:
                queue.files.mend()
            has_its_name = queue.files.count(FileOp.RENAME) > renames and op != FileOp.RENAME
            assert_same(infinity.io.load(path, queue=queue), new if has_its_name else old)
            assert leftovers(tmp_path) == []
        assert errors
        assert {error.errno for error in errors if isinstance(error, IoError)} <= {code}
        assert_same(infinity.io.load(path, queue=queue), new)
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_a_save_syncs_the_bytes_before_the_name_and_the_name_before_it_returns(one_queue: Queue, tmp_path: Path) -> None:
    files = one_queue.files
    before = {op: files.count(op) for op in FileOp}
    infinity.io.save({"a": torch.ones(10)}, tmp_path / "a", queue=one_queue)
    assert [files.count(op) - before[op] for op in (FileOp.DATASYNC, FileOp.RENAME, FileOp.SYNC)] == [1, 1, 1]


def test_the_rights_of_the_old_file_and_a_link_to_it_stay(one_queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "a").chmod(0o640)
    (tmp_path / "link").symlink_to("a")
    infinity.io.save({"a": torch.ones(3)}, tmp_path / "link", queue=one_queue)
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    assert list(infinity.io.load(tmp_path / "a", queue=one_queue)) == ["a"]


def test_almost_everything_goes_past_the_page_cache(one_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct_works(tmp_path):
        pytest.skip("no O_DIRECT here")
    plans = []
    plan = infinity.io.File._plan

    def recorded(self, batch, future, address, priority):  # type: ignore[no-untyped-def]
        done = plan(self, batch, future, address, priority)
        plans.append((future.offset % GRAIN_NBYTES, future.nbytes))
        return done

    monkeypatch.setattr(infinity.io.File, "_plan", recorded)
    tensors = {f"t{i}": torch.randn(1000 + 77_777 * i) for i in range(30)}
    infinity.io.save(tensors, tmp_path / "a", queue=one_queue)
    assert {begin for begin, _ in plans} == {0}
    assert sum(nbytes % GRAIN_NBYTES > 0 for _, nbytes in plans) <= 1


def test_the_memory_of_a_save_is_bounded(one_queue: Queue, tmp_path: Path) -> None:
    base = torch.randn(6000, 5000)
    infinity.io.save({"warm": torch.randn(10_000_000).t()}, tmp_path / "a", queue=one_queue)

    def peak() -> int:
        return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))

    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    infinity.io.save({"transposed": base.t(), "plain": base}, tmp_path / "a", queue=one_queue)
    assert peak() - before < 80 << 20
