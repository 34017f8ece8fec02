"""Peers do the job that the case says, are told apart from ourselves, and are never needed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infinity.io_bench import Bench, Case, Direction
from infinity.io_peers import FIO_ENGINES, DeepSpeed, Fio, Peer, PeerError, PeerRun, fio_arguments, measure, parse_fio
from tests.support.peers import install_deepspeed, install_fio, runs_of

KIB = 1 << 10
JOB = Case(direction=Direction.READ, nbytes=256 * KIB, block_nbytes=16 * KIB, queue_depth=4)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path, file_nbytes=JOB.nbytes, memory_nbytes=JOB.nbytes) as bench:
        yield bench


@pytest.fixture
def fio_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    log = install_fio(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return log


def test_fio_is_given_the_job_of_the_case() -> None:
    arguments = fio_arguments(replace(JOB, direction=Direction.MIXED), "/proc/1/fd/9", "libaio")
    expected = {"--filename=/proc/1/fd/9", f"--size={JOB.nbytes}", f"--bs={JOB.block_nbytes}", "--iodepth=4", "--rw=rw", "--rwmixread=50"}
    assert expected | {"--direct=1", "--ioengine=libaio", "--numjobs=1"} <= set(arguments)


@pytest.mark.parametrize("direction", list(Direction))
def test_fio_does_the_case_on_our_file(bench: Bench, fio_log: Path, direction: Direction) -> None:
    run = Fio("libaio").run(replace(JOB, direction=direction), bench)
    assert run == PeerRun(seconds=0.01, nbytes=JOB.nbytes, cpu_s=pytest.approx(0.005))
    assert runs_of(fio_log)[0]["filename"] == bench.path


def test_fio_that_is_not_installed_is_a_peer_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PeerError, match="fio is not installed"):
        Fio("libaio")


def test_an_engine_that_fio_cannot_load_is_a_failure_and_the_other_goes_on(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fio(tmp_path / "bin", broken=("io_uring",))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    measured = measure(bench, JOB, runs=2, peers=[Fio(engine) for engine in FIO_ENGINES])
    assert [peer.variant for peer in measured.peers] == ["libaio"]
    assert len(measured.failures) == 1
    assert "io_uring not loadable" in measured.failures[0]
    assert measured.ratio("fio") is not None


@pytest.mark.parametrize("answer", [{}, {"jobs": []}, {"jobs": [{"error": 0, "read": {}}]}])
def test_an_answer_of_fio_that_is_something_else_is_an_error(answer: dict[str, object]) -> None:
    with pytest.raises((KeyError, IndexError)):
        parse_fio(answer)


def test_a_failed_job_of_fio_is_no_figure() -> None:
    side = {"io_bytes": 4096, "runtime": 1}
    with pytest.raises(PeerError, match="Input/output"):
        parse_fio({"jobs": [{"error": 5, "read": side, "write": side, "usr_cpu": 0, "sys_cpu": 0, "job_runtime": 1}]})


def test_a_job_too_short_for_the_clock_of_fio_is_no_figure() -> None:
    side = {"io_bytes": 4096, "runtime": 0}
    with pytest.raises(PeerError, match="Raise the size"):
        parse_fio({"jobs": [{"error": 0, "read": side, "write": side, "usr_cpu": 0, "sys_cpu": 0, "job_runtime": 0}]})


class Scripted(Peer):
    """Answers as it is told, and notes whose turn it was."""

    version = "1"

    def __init__(self, variant: str, rate: float, turns: list[str]) -> None:
        self.name, self.variant, self.rate, self.turns = "scripted", variant, rate, turns

    def run(self, case: Case, bench: Bench) -> PeerRun:
        self.turns.append(self.variant)
        return PeerRun(seconds=case.nbytes / self.rate, nbytes=case.nbytes, cpu_s=0)


def test_all_take_turns_and_each_round_begins_with_another(bench: Bench) -> None:
    turns: list[str] = []
    steps: list[str] = []
    measure(bench, JOB, runs=3, peers=[Scripted("a", 1e9, turns), Scripted("b", 1e9, turns)], step=steps.append)
    assert turns == ["a", "b", "a", "b", "a", "b", "b", "a"]
    assert steps[:3] == ["warm-up"] * 3
    assert [step.split()[-1] for step in steps[3:]] == ["infinity", "a", "b", "a", "b", "infinity", "b", "infinity", "a"]


def test_the_ratio_is_to_the_better_variant_round_by_round(bench: Bench) -> None:
    measured = measure(bench, JOB, runs=3, peers=[Scripted("slow", 1e6, []), Scripted("fast", 1e9, [])])
    best, ratio = measured.best("scripted"), measured.ratio("scripted")
    assert best is not None
    assert best.variant == "fast"
    assert ratio is not None
    assert ratio.median == pytest.approx(measured.bytes_per_s.median / 1e9)
    assert measured.ratio("unknown") is None


def worker(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> DeepSpeed:
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    return DeepSpeed()


@pytest.mark.parametrize(("page_nbytes", "calls"), [(None, 1), (64 * KIB, 4)])
@pytest.mark.parametrize("direction", list(Direction))
def test_deepspeed_does_the_case_on_our_file(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: Direction, page_nbytes: int | None, calls: int
) -> None:
    before = Path(bench.path).read_bytes()
    peer = worker(monkeypatch, install_deepspeed(tmp_path / "site"))
    try:
        assert peer.version == "0.19-fake"
        run = peer.run(replace(JOB, direction=direction, page_nbytes=page_nbytes), bench)
        again = peer.run(replace(JOB, direction=direction, page_nbytes=page_nbytes), bench)
    finally:
        peer.close()
    assert run.nbytes == again.nbytes == JOB.nbytes
    assert run.seconds > 0
    after = Path(bench.path).read_bytes()
    half = JOB.nbytes // 2
    changed = {Direction.READ: (False, False), Direction.WRITE: (True, True), Direction.MIXED: (True, False)}[direction]
    assert (before[:half] != after[:half], before[half:] != after[half:]) == changed


def test_deepspeed_that_lost_a_call_is_no_figure(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = worker(monkeypatch, install_deepspeed(tmp_path / "site", lost=1))
    try:
        with pytest.raises(PeerError, match="0 of 1 calls"):
            peer.run(JOB, bench)
    finally:
        peer.close()


def test_deepspeed_that_does_not_load_is_a_peer_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerError, match="Unable to JIT load"):
        worker(monkeypatch, install_deepspeed(tmp_path / "site", broken=True))


def test_deepspeed_that_is_not_installed_is_a_peer_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "deepspeed.py").write_text("raise ImportError('No module named deepspeed')")
    with pytest.raises(PeerError, match=r"not installed in .*--deepspeed-python"):
        worker(monkeypatch, {"PYTHONPATH": str(site)})


def test_a_python_that_is_not_there_is_a_peer_error() -> None:
    with pytest.raises(PeerError, match="cannot be run"):
        DeepSpeed("/no/such/python")


def test_a_process_that_ends_at_once_is_a_peer_error(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(PeerError, match="exit code 3"):
        DeepSpeed(os.fspath(program))
