"""Each kernel against its scalar reference and against the formulas of tests/support/reference.py."""

from __future__ import annotations

import errno
import math
import re
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from infinity import kernel_args
from infinity.kernel_args import (
    AccumulateSegment,
    Check,
    Kernel,
    Segment,
    Simd,
    SumsqSegment,
    pack_accumulate,
    pack_adamw,
    pack_checksum,
    pack_copy,
    pack_sleep,
    pack_split,
    pack_sumsq,
    pack_verify,
)
from infinity.native import ffi, lib
from infinity.optim.adamw import AdamW
from tests.support import reference
from tests.support.kernels import Array, address, at_odd_offset, bits, crc32c_by, crc_versions, run, run_well

ABI = Path(__file__).resolve().parents[2] / "native" / "abi.h"

needs_avx2 = pytest.mark.skipif(lib.inf_simd_best() != Simd.AVX2, reason="this machine has no AVX2 with FMA")

LENGTHS = [*range(71), 127, 128, 1000, 1023, 1024, 1025, 4097]

SPECIAL_BITS = np.array(
    [
        0x00000000, 0x80000000,  # zeros
        0x00000001, 0x80000001, 0x007FFFFF, 0x00400000,  # denormals
        0x00800000, 0x3F800000, 0xBF800000, 0x3F808000, 0x3F807FFF, 0x3F818000,  # ordinary, and ties of the split
        0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7F7FFF, 0xFF7F8000, 0xFF7FFFFF,  # about the largest
        0x7F800000, 0xFF800000,  # infinities
        0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFBFFFFF, 0x7FFFFFFF,  # NaNs, quiet and signalling
    ],
    dtype=np.uint32,
)  # fmt: skip


def any_floats(numel: int, seed: int) -> Array:
    """fp32 of every kind: ordinary ones of very different size, and one in four special."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(numel) * 10.0 ** rng.integers(-20, 18, numel)).astype(np.float32)
    special = rng.random(numel) < 0.25
    values[special] = rng.choice(SPECIAL_BITS, numel)[special].view(np.float32)
    return values


def ordinary_floats(numel: int, seed: int, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(numel) * scale).astype(np.float32)


def as_bf16(values: Array) -> Array:
    """The high halves, cut off."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def widened(values: Array) -> Array:
    return (values.astype(np.uint32) << 16).view(np.float32)


def tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)


def grad_tensor(array: Array) -> torch.Tensor:
    return tensor(array).view(torch.bfloat16) if array.dtype == np.uint16 else tensor(array)


# ---- crc32c ----


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0x00000000),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_crc32c_has_the_values_of_rfc_3720(data: bytes, crc: int) -> None:
    assert lib.inf_crc32c(ffi.from_buffer(data), len(data), 0) == crc
    assert lib.inf_crc32c_table(ffi.from_buffer(data), len(data), 0) == crc


@pytest.mark.parametrize("version", crc_versions())
@pytest.mark.parametrize("offset", [0, 1, 5])
def test_crc32c_of_every_version_equals_the_table_at_every_length(version: int, offset: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 30_000, dtype=np.uint8)
    start = ffi.cast("void *", address(data) + offset)
    lengths = [*range(600), 767, 768, 769, 1023, 1024, 1025, 1535, 1536, 1537, 4096, 12_287, 12_288, 12_289, 13_056, 24_577, 29_000]
    for nbytes in lengths:
        for seed in (0, 7, 0xFFFFFFFF):
            assert crc32c_by(version, start, nbytes, seed) == lib.inf_crc32c_table(start, nbytes, seed)


def test_a_version_of_crc32c_that_nobody_knows_is_refused() -> None:
    for version in (-1, lib.INF_CRC_VERSIONS):
        assert lib.inf_crc32c_by(version, ffi.new("char[8]"), 8, 0, ffi.new("uint32_t *")) == -errno.EINVAL


@pytest.mark.parametrize("version", crc_versions())
def test_crc32c_continues_from_a_seed(version: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, 20_000, dtype=np.uint8)
    start = ffi.cast("char *", address(data))
    for cut in (0, 1, 4096, 12_345, 20_000):
        whole = crc32c_by(version, start + cut, data.size - cut, crc32c_by(version, start, cut, 0))
        assert whole == lib.inf_crc32c_table(start, data.size, 0)


def test_the_checksum_kernel_answers_the_crc32c() -> None:
    data = np.frombuffer(b"123456789", np.uint8)
    assert run_well(Kernel.CHECKSUM, pack_checksum(address(data), data.size)) == 0xE3069283


def test_verify_accepts_the_right_checksum() -> None:
    data = np.frombuffer(b"123456789", np.uint8)
    assert run(Kernel.VERIFY, pack_verify(address(data), data.size, 0xE3069283)) == (0, 0xE3069283)


def test_verify_fails_and_says_what_it_found() -> None:
    data = np.frombuffer(b"123456789", np.uint8)
    assert run(Kernel.VERIFY, pack_verify(address(data), data.size, 1)) == (-errno.EBADMSG, 0xE3069283)


# ---- copy, sleep, arguments ----


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 100_001])
def test_copy_copies_exactly_the_bytes_asked_for(nbytes: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, nbytes + 1, dtype=np.uint8)
    to = np.full(nbytes + 1, 77, np.uint8)
    run_well(Kernel.COPY, pack_copy(address(to), address(source), nbytes))
    assert np.array_equal(to[:nbytes], source[:nbytes])
    assert to[nbytes] == 77


def test_sleep_waits_and_ends_with_the_status_and_value_given() -> None:
    before = time.monotonic()
    assert run(Kernel.SLEEP, pack_sleep(20_000, -errno.EIO, 5)) == (-errno.EIO, 5)
    assert time.monotonic() - before >= 0.02


@pytest.mark.parametrize("kernel", [-1, len(Kernel), 10_000])
def test_an_unknown_kernel_is_refused(kernel: int) -> None:
    args = ffi.new("uint64_t[8]")
    assert lib.inf_kernel_run(kernel, args, 64, ffi.new("uint64_t *")) == -errno.EINVAL


@pytest.mark.parametrize("kernel", list(Kernel))
@pytest.mark.parametrize("nbytes", [0, 1, 12, 1000])
def test_arguments_of_a_wrong_size_are_refused(kernel: Kernel, nbytes: int) -> None:
    args = ffi.new("uint64_t[]", 125)
    args[0] = 1 << 32 | 1 << 31 | 3  # for kernels with segments: far more of them than there are bytes
    assert lib.inf_kernel_run(int(kernel), args, nbytes, ffi.new("uint64_t *")) == -errno.EINVAL


def test_arguments_that_are_not_aligned_are_refused() -> None:
    args = ffi.new("uint64_t[8]")
    assert lib.inf_kernel_run(Kernel.COPY, ffi.cast("char *", args) + 4, 24, ffi.new("uint64_t *")) == -errno.EINVAL


@pytest.mark.parametrize(
    ("packed", "struct_name"),
    [
        (kernel_args._COPY, "inf_copy_args"),
        (kernel_args._CHECKSUM, "inf_checksum_args"),
        (kernel_args._CHECK, "inf_check"),
        (kernel_args._SLEEP, "inf_sleep_args"),
        (kernel_args._SPLIT, "inf_split_args"),
        (kernel_args._SEGMENTS, "inf_accumulate_args"),
        (kernel_args._SEGMENTS, "inf_sumsq_args"),
        (kernel_args._ACCUMULATE_SEGMENT, "inf_accumulate_segment"),
        (kernel_args._SUMSQ_SEGMENT, "inf_sumsq_segment"),
        (kernel_args._ADAMW, "inf_adamw_args"),
        (kernel_args._ADAMW_SEGMENT, "inf_adamw_segment"),
    ],
)
def test_the_packed_form_has_the_size_of_the_struct(packed: struct.Struct, struct_name: str) -> None:
    assert packed.size == ffi.sizeof(struct_name)


@pytest.mark.parametrize(("prefix", "values"), [("INF_KERNEL_", Kernel), ("INF_SIMD_", Simd), ("INF_CHECK_", Check)])
def test_the_enums_are_those_of_the_abi(prefix: str, values: type[Kernel] | type[Simd] | type[Check]) -> None:
    names = set(re.findall(rf"\b{prefix}([A-Z0-9]+)\b(?=\s*[,=}}])", ABI.read_text()))
    assert names == {value.name for value in values}
    for value in values:
        assert getattr(lib, prefix + str(value.name)) == value
    assert kernel_args.CHECKS_MAX == lib.INF_CHECKS_MAX


def test_auto_takes_the_best_variant_of_this_machine() -> None:
    assert lib.inf_simd_best() in (Simd.SCALAR, Simd.AVX2)


def test_an_unknown_variant_is_refused() -> None:
    for kernel in (Kernel.ACCUMULATE, Kernel.SUMSQ):
        assert run(kernel, struct.pack("=2I", 0, 99))[0] == -errno.EINVAL


# ---- 16 + 16 split ----


def split_here(master: Array) -> tuple[Array, Array]:
    hi, lo = np.empty(master.size, np.uint16), np.empty(master.size, np.uint16)
    run_well(Kernel.SPLIT, pack_split(address(master), address(hi), address(lo), master.size))
    return hi, lo


def join_here(hi: Array, lo: Array) -> Array:
    master = np.empty(hi.size, np.float32)
    run_well(Kernel.JOIN, pack_split(address(master), address(hi), address(lo), hi.size))
    return master


def test_split_and_join_are_exact_below_the_largest_values() -> None:
    for residue in range(4):  # a quarter of a sparse sweep at a time; the stride is odd, so every low half occurs
        pattern = np.arange(residue * 251, 0x7F7F8000, 1009, dtype=np.uint32)
        for sign in (0, 0x80000000):
            master = (pattern | np.uint32(sign)).view(np.float32)
            assert np.array_equal(bits(join_here(*split_here(master))), bits(master))


def test_split_is_exact_for_every_low_half() -> None:
    for hi in (0x0000, 0x0001, 0x007F, 0x3F80, 0x7F7E, 0x8000, 0xBF80, 0xFF7E):
        master = ((np.uint32(hi) << np.uint32(16)) + np.arange(1 << 16, dtype=np.uint32)).view(np.float32)
        assert np.array_equal(bits(join_here(*split_here(master))), bits(master))


@pytest.mark.parametrize(
    ("bits_in", "hi", "lo"),
    [
        (0x3F808000, 0x3F81, 0x8000),  # a tie goes away from zero
        (0xBF808000, 0xBF81, 0x8000),
        (0x3F807FFF, 0x3F80, 0x7FFF),
        (0x7F7F7FFF, 0x7F7F, 0x7FFF),
        (0x7F7F8000, 0x7F7F, 0x7FFF),  # saturated
        (0xFF7FFFFF, 0xFF7F, 0x7FFF),
        (0x7F800000, 0x7F80, 0),
        (0xFF800000, 0xFF80, 0),
        (0x7F800001, 0x7FC0, 0),
        (0xFFFFFFFF, 0xFFC0, 0),
        (0x00000000, 0x0000, 0),
        (0x80000000, 0x8000, 0),
        (0x00008000, 0x0001, 0x8000),
    ],
)
def test_split_gives_these_halves(bits_in: int, hi: int, lo: int) -> None:
    master = np.full(17, bits_in, np.uint32).view(np.float32)  # sixteen by vector, one by scalar
    hi_found, lo_found = split_here(master)
    assert hi_found.tolist() == [hi] * 17
    assert lo_found.tolist() == [lo] * 17


@pytest.mark.parametrize("numel", LENGTHS)
def test_split_equals_the_reference_at_every_length(numel: int) -> None:
    master = any_floats(numel, numel)
    hi, lo = split_here(master)
    hi_wanted, lo_wanted = reference.split(torch.from_numpy(master))
    assert np.array_equal(hi.view(np.int16), hi_wanted.numpy())
    assert np.array_equal(lo.view(np.int16), lo_wanted.numpy())


@pytest.mark.parametrize("numel", LENGTHS)
def test_join_equals_the_reference_at_every_length(numel: int) -> None:
    rng = np.random.default_rng(numel)
    hi, lo = rng.integers(0, 1 << 16, numel, dtype=np.uint16), rng.integers(0, 1 << 16, numel, dtype=np.uint16)
    assert np.array_equal(bits(join_here(hi, lo)), bits(reference.join(tensor(hi), tensor(lo)).numpy()))


# ---- accumulate ----


def accumulate_here(to: Array, source: Array, *, add: bool, variant: Simd = Simd.AUTO) -> None:
    segment = AccumulateSegment(address(to), address(source), source.size, source.dtype == np.uint16, add)
    run_well(Kernel.ACCUMULATE, pack_accumulate([segment], variant))


@needs_avx2
@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_accumulate_of_avx2_equals_scalar_bit_for_bit(form: str, add: bool, offset: int) -> None:
    for numel in LENGTHS:
        source = any_floats(numel, numel)
        source = at_odd_offset(as_bf16(source) if form == "bf16" else source, offset)
        scalar = any_floats(numel, numel + 1)
        avx2 = at_odd_offset(scalar, offset)
        accumulate_here(scalar, source, add=add, variant=Simd.SCALAR)
        accumulate_here(avx2, source, add=add, variant=Simd.AVX2)
        assert np.array_equal(bits(scalar), bits(avx2))


@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_accumulate_adds_in_fp32(form: str) -> None:
    source = ordinary_floats(1000, 0)
    source = as_bf16(source) if form == "bf16" else source
    to = ordinary_floats(1000, 1)
    wanted = to + (widened(source) if form == "bf16" else source)
    accumulate_here(to, source, add=True)
    assert np.array_equal(bits(to), bits(wanted))


@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_accumulate_without_add_overwrites_and_keeps_every_bit(form: str) -> None:
    source = any_floats(1000, 0)
    source = as_bf16(source) if form == "bf16" else source
    to = np.full(1000, np.nan, np.float32)
    accumulate_here(to, source, add=False)
    assert np.array_equal(bits(to), bits(widened(source) if form == "bf16" else source))


def test_accumulate_takes_several_segments() -> None:
    to = np.zeros(20, np.float32)
    source = ordinary_floats(20, 0)
    segments = [
        AccumulateSegment(address(to), address(source), 5, False, False),
        AccumulateSegment(address(to[9:]), address(source[9:]), 11, False, True),
    ]
    run_well(Kernel.ACCUMULATE, pack_accumulate(segments))
    assert np.array_equal(to, np.concatenate([source[:5], np.zeros(4, np.float32), source[9:]]))


def test_accumulate_refuses_an_unknown_format_and_does_nothing() -> None:
    to, source = np.zeros(4, np.float32), np.ones(4, np.float32)
    good = pack_accumulate([AccumulateSegment(address(to), address(source), 4, False, True)])[8:]
    bad = struct.pack("=3QiI", address(to), address(source), 4, 9, 1)
    assert run(Kernel.ACCUMULATE, struct.pack("=2I", 2, 0) + good + bad)[0] == -errno.EINVAL
    assert not to.any()


# ---- sums of squares ----


def sumsq_here(source: Array, variant: Simd = Simd.AUTO) -> Array:
    sums = np.full(-(-source.size // 1024) + 1, 7.0)
    segment = SumsqSegment(address(source), address(sums), source.size, source.dtype == np.uint16)
    run_well(Kernel.SUMSQ, pack_sumsq([segment], variant))
    assert sums[-1] == 7.0  # one sum for each run and no more
    return sums[:-1]


SUMSQ_LENGTHS = [*LENGTHS, 2048, 4096, 5 * 1024 + 3, 9 * 1024 + 513]


@needs_avx2
@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_sumsq_of_avx2_equals_scalar_bit_for_bit(form: str, offset: int) -> None:
    for numel in SUMSQ_LENGTHS:
        for values in (any_floats(numel, numel), ordinary_floats(numel, numel)):
            source = at_odd_offset(as_bf16(values) if form == "bf16" else values, offset)
            assert np.array_equal(bits(sumsq_here(source, Simd.SCALAR)), bits(sumsq_here(source, Simd.AVX2)))


@pytest.mark.parametrize("variant", [Simd.SCALAR, Simd.AUTO])
@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_sumsq_equals_the_reference(form: str, variant: Simd) -> None:
    for numel in SUMSQ_LENGTHS:
        values = ordinary_floats(numel, numel, 1e-3)
        source = as_bf16(values) if form == "bf16" else values
        assert np.array_equal(sumsq_here(source, variant), reference.run_sums(grad_tensor(source)))


def test_sumsq_of_values_whose_squares_leave_fp32_is_finite() -> None:
    assert sumsq_here(np.full(8, 3e38, np.float32))[0] == pytest.approx(8 * float(np.float32(3e38)) ** 2, rel=1e-15)


def test_sumsq_shows_infinities_and_nans() -> None:
    values = np.ones(3 * 1024, np.float32)
    values[5], values[2000] = np.inf, np.nan
    sums = sumsq_here(values)
    assert sums[0] == math.inf
    assert math.isnan(sums[1])
    assert sums[2] == 1024.0


# ---- AdamW ----


class Tile:
    """The planes of a tile as arrays; a moment is one array or two pieces."""

    def __init__(self, master: Array, exp_avg: Array, exp_avg_sq: Array, *, bf16: bool, offset: int = 0, piece_numel: int = 0) -> None:
        self.numel = master.size
        self.piece_numel = piece_numel or max(master.size, 1)
        if bf16:
            hi, lo = reference.split(torch.from_numpy(master.copy()))
            self.param = at_odd_offset(hi.numpy().view(np.uint16), offset)
            self.residual: Array | None = at_odd_offset(lo.numpy().view(np.uint16), offset)
        else:
            self.param, self.residual = at_odd_offset(master, offset), None
        cuts = [slice(0, self.piece_numel), slice(self.piece_numel, None)] if self.piece_numel < self.numel else [slice(0, None)]
        self.exp_avg = [at_odd_offset(exp_avg[cut], offset) for cut in cuts]
        self.exp_avg_sq = [at_odd_offset(exp_avg_sq[cut], offset) for cut in cuts]

    def update(self, segments: list[Segment], variant: Simd = Simd.AUTO) -> None:
        run_well(Kernel.ADAMW, self.pack(segments, variant))

    def pack(self, segments: list[Segment], variant: Simd = Simd.AUTO) -> bytes:
        return pack_adamw(
            address(self.param),
            0 if self.residual is None else address(self.residual),
            [address(piece) for piece in self.exp_avg],
            [address(piece) for piece in self.exp_avg_sq],
            self.piece_numel,
            segments,
            variant,
        )

    def state(self) -> list[Array]:
        """Bits of param, residual (or nothing), exp_avg, exp_avg_sq."""
        residual = [] if self.residual is None else [bits(self.residual)]
        return [bits(self.param), *residual, bits(np.concatenate(self.exp_avg)), bits(np.concatenate(self.exp_avg_sq))]


def scalars_of(beta1: float = 0.9, step: int = 3, grad_factor: float = 1.0) -> bytes:
    return AdamW().scalars({"lr": 1e-2, "betas": (beta1, 0.99), "eps": 1e-8, "weight_decay": 0.1}, step, grad_factor)


def reference_scalars(beta1: float = 0.9, step: int = 3) -> reference.AdamWScalars:
    return reference.AdamWScalars.of(lr=1e-2, betas=(beta1, 0.99), eps=1e-8, weight_decay=0.1, step=step)


def whole(grad: Array, scalars: bytes) -> list[Segment]:
    return [Segment(address(grad), 0, grad.size, grad.dtype == np.uint16, scalars)]


def equal(left: list[Array], right: list[Array]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@needs_avx2
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("grad_bf16", [False, True])
@pytest.mark.parametrize("beta1", [0.9, 0.3, 0.5])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_adamw_of_avx2_equals_scalar_bit_for_bit(bf16: bool, grad_bf16: bool, beta1: float, offset: int) -> None:
    for numel in LENGTHS:
        for floats in (any_floats, ordinary_floats):
            master, grad, exp_avg = floats(numel, numel), floats(numel, numel + 1), floats(numel, numel + 2)
            exp_avg_sq = floats(numel, numel + 3)  # negative ones too
            grad = at_odd_offset(as_bf16(grad) if grad_bf16 else grad, offset)
            scalar = Tile(master, exp_avg, exp_avg_sq, bf16=bf16)
            avx2 = Tile(master, exp_avg, exp_avg_sq, bf16=bf16, offset=offset)
            segments = whole(grad, scalars_of(beta1, grad_factor=0.7))
            scalar.update(segments, Simd.SCALAR)
            avx2.update(segments, Simd.AVX2)
            assert equal(scalar.state(), avx2.state())


@pytest.mark.parametrize("variant", [Simd.SCALAR, Simd.AUTO])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("grad_bf16", [False, True])
@pytest.mark.parametrize("beta1", [0.9, 0.3, 0.5, 0.0])
@pytest.mark.parametrize("floats", [ordinary_floats, any_floats])
def test_adamw_equals_the_reference_bit_for_bit(variant: Simd, bf16: bool, grad_bf16: bool, beta1: float, floats: object) -> None:
    assert callable(floats)
    numel = 3001
    master, exp_avg, exp_avg_sq = floats(numel, 0), floats(numel, 1), np.abs(floats(numel, 2))
    tile = Tile(master, exp_avg, exp_avg_sq, bf16=bf16)
    if bf16:
        master = reference.join(*reference.split(torch.from_numpy(master))).numpy()
    p, m, v = torch.from_numpy(master), torch.from_numpy(exp_avg), torch.from_numpy(exp_avg_sq)
    for step in range(1, 5):
        grad = floats(numel, 10 + step)
        grad = as_bf16(grad) if grad_bf16 else grad
        factor = 1.0 if step % 2 else 0.37
        tile.update(whole(grad, scalars_of(beta1, step, factor)), variant)
        p, m, v = reference.adamw(p, m, v, grad_tensor(grad), reference_scalars(beta1, step), float(np.float32(factor)))
        wanted = [m.numpy(), v.numpy()]
        if bf16:
            hi, lo = reference.split(p)
            p = reference.join(hi, lo)
            wanted = [hi.numpy(), lo.numpy(), *wanted]
        else:
            wanted = [p.numpy(), *wanted]
        assert equal(tile.state(), [bits(array) for array in wanted])


@pytest.mark.parametrize("bf16", [False, True])
def test_adamw_changes_only_its_segments(bf16: bool) -> None:
    numel = 4096
    arrays = [ordinary_floats(numel, seed) for seed in range(3)]
    arrays[2] = np.abs(arrays[2])
    grad = ordinary_floats(numel, 3)
    tile, before, all_updated = (Tile(*arrays, bf16=bf16) for _ in range(3))
    parts = [(0, 100), (1024, 2047), (3000, 3000), (3072, 4096)]
    tile.update([Segment(address(grad[begin:]), begin, end, False, scalars_of()) for begin, end in parts])
    all_updated.update(whole(grad, scalars_of()))
    inside = np.zeros(numel, bool)
    for begin, end in parts:
        inside[begin:end] = True
    for found, old, new in zip(tile.state(), before.state(), all_updated.state(), strict=True):
        assert np.array_equal(found, np.where(inside, new, old))


def test_adamw_gives_each_segment_its_own_scalars_and_gradient_format() -> None:
    numel = 2048
    arrays = [ordinary_floats(numel, seed) for seed in range(3)]
    arrays[2] = np.abs(arrays[2])
    grad, grad_bf16 = ordinary_floats(1024, 3), as_bf16(ordinary_floats(1024, 4))
    tile = Tile(*arrays, bf16=True)
    tile.update(
        [Segment(address(grad), 0, 1024, False, scalars_of(0.9, 1)), Segment(address(grad_bf16), 1024, 2048, True, scalars_of(0.3, 9))]
    )
    first, second = (Tile(*(array[half] for array in arrays), bf16=True) for half in (slice(0, 1024), slice(1024, 2048)))
    first.update(whole(grad, scalars_of(0.9, 1)))
    second.update(whole(grad_bf16, scalars_of(0.3, 9)))
    assert equal(tile.state(), [np.concatenate(pair) for pair in zip(first.state(), second.state(), strict=True)])


@pytest.mark.parametrize("variant", [Simd.SCALAR, Simd.AUTO])
@pytest.mark.parametrize(("begin", "end"), [(0, 3000), (5, 2999), (0, 1536), (1536, 3000), (1535, 1537), (1400, 1401)])
def test_adamw_takes_moments_in_two_pieces(variant: Simd, begin: int, end: int) -> None:
    arrays = [ordinary_floats(3000, seed) for seed in range(3)]
    arrays[2] = np.abs(arrays[2])
    grad = ordinary_floats(3000, 3)
    one, two = Tile(*arrays, bf16=True), Tile(*arrays, bf16=True, piece_numel=1536)
    segments = [Segment(address(grad[begin:]), begin, end, False, scalars_of())]
    one.update(segments, variant)
    two.update(segments, variant)
    assert equal(one.state(), two.state())


@pytest.mark.parametrize("broken", ["begin after end", "beyond the pieces", "no pieces", "variant"])
def test_adamw_refuses_what_cannot_be_right_and_does_nothing(broken: str) -> None:
    arrays = [ordinary_floats(64, seed) for seed in range(3)]
    grad = ordinary_floats(64, 3)
    tile, before = Tile(*arrays, bf16=False), Tile(*arrays, bf16=False)
    segments = whole(grad, scalars_of())
    variant: int = Simd.AUTO
    if broken == "begin after end":
        segments.append(Segment(address(grad), 9, 8, False, scalars_of()))
    elif broken == "beyond the pieces":
        segments.append(Segment(address(grad), 60, 65, False, scalars_of()))
    elif broken == "no pieces":
        tile.piece_numel = 0
    else:
        variant = 17
    args = pack_adamw(
        address(tile.param), 0, [address(tile.exp_avg[0])], [address(tile.exp_avg_sq[0])], tile.piece_numel, segments, variant
    )  # type: ignore[arg-type]
    assert run(Kernel.ADAMW, args)[0] == -errno.EINVAL
    assert equal(tile.state(), before.state())


def test_adamw_computes_with_denormals_when_its_thread_flushes_them() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush denormals")
    torch.set_flush_denormal(False)
    tiny = np.full(64, 1e-40, np.float32)
    usual, flushing = (Tile(tiny, tiny, tiny, bf16=False) for _ in range(2))
    usual.update(whole(tiny, scalars_of()))
    still_flushes: list[bool] = []

    def in_a_flushing_thread() -> None:
        torch.set_flush_denormal(True)
        flushing.update(whole(tiny, scalars_of()))
        still_flushes.append(bool((torch.from_numpy(tiny) * 1.0 == 0).all()))

    thread = threading.Thread(target=in_a_flushing_thread)
    thread.start()
    thread.join()
    assert equal(usual.state(), flushing.state())
    assert still_flushes == [True]
