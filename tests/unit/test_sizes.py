"""Bytes and seconds, read and printed."""

from __future__ import annotations

import pytest

from infinity.sizes import align_down, align_up, format_bytes, format_rate, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("512", 512),
        ("512B", 512),
        ("8MiB", 8 << 20),
        ("8 MiB", 8 << 20),
        (" 8mib ", 8 << 20),
        ("1M", 1 << 20),
        ("2K", 2 << 10),
        ("2GB", 2_000_000_000),
        ("2GiB", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("0.1GB", 100_000_000),
        ("1TB", 10**12),
        ("1PiB", 1 << 50),
        ("0.3KiB", 307),
    ],
)
def test_bytes_are_read_as_people_write_them(written: int | str, nbytes: int) -> None:
    assert parse_bytes(written) == nbytes


@pytest.mark.parametrize("written", ["", "GB", "-1", "1e3", "1,5GB", "8MBit", "8iB", "0.5", "1 2", "٣", True, None, 1.5, -1, "9" * 30])
def test_what_is_not_a_number_of_bytes_is_a_value_error(written: object) -> None:
    with pytest.raises(ValueError, match="bytes"):
        parse_bytes(written)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 << 19, "1.50 MiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        (2 << 30, "2.00 GiB"),
        (5 << 40, "5.00 TiB"),
        (3 << 50, "3.00 PiB"),
        (-(1 << 20), "-1.00 MiB"),
    ],
)
def test_bytes_are_printed_in_powers_of_1024(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0, "0 B/s"), (850_000, "850 kB/s"), (999_999, "1 MB/s"), (12e6, "12 MB/s"), (1.953e9, "1.95 GB/s"), (-12e6, "-12 MB/s")],
)
def test_rates_are_printed_in_powers_of_1000(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (12e-6, "12 us"),
        (0.0034, "3.4 ms"),
        (0.99999, "1.00 s"),
        (1.25, "1.25 s"),
        (59.999, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.9, "1 h 00 min"),
        (7380, "2 h 03 min"),
        (-1.25, "-1.25 s"),
    ],
)
def test_durations_are_printed_with_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "alignment", "down", "up"), [(0, 4, 0, 0), (1, 4, 0, 4), (4, 4, 4, 4), (5, 4, 4, 8), (7, 1, 7, 7), (10, 6, 6, 12)]
)
def test_values_are_aligned_down_and_up(value: int, alignment: int, down: int, up: int) -> None:
    assert (align_down(value, alignment), align_up(value, alignment)) == (down, up)
