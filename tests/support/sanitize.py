"""The native code under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer; any report is a failure.

Two ways: the stress driver (tests/native/stress.cpp), all of whose code the sanitizers see, with each compiler that is here; and the
native tests, through Python, with the module built for the sanitizer in a copy of the sources.

    python -m tests.support.sanitize --help
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = ("thread", "address", "undefined")
RUNTIMES = {"thread": "libtsan.so", "address": "libasan.so", "undefined": "libubsan.so"}
TESTS = (
    "tests/native",
    "tests/property/test_task_queue.py",
    "tests/property/test_task_queue_faults.py",
    "tests/fault/test_queue_faults.py",
    "tests/unit/test_task_queue.py",
)
_TWO_GIB = ("-k", "not two_gib")  # a sanitizer keeps several bytes of its own for each byte that is touched
LEFT_OUT = {
    # Where only the order of transfers counts, they share memory, which is a race and harms nothing.
    "thread": (*_TWO_GIB, "--ignore", "tests/native/test_queue_order.py"),
    "address": _TWO_GIB,
    "undefined": _TWO_GIB,
}
COPIED = ("infinity", "native", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")
FLAGS = ("-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-ffp-contract=off", "-pthread")
OPTIONS = {
    # Tests touch memory that is not there, in children, and look at the signal that ends them.
    "TSAN_OPTIONS": "handle_segv=0:second_deadlock_stack=1",
    # What Python keeps to its end is no leak of ours; tests close what they open and count descriptors and threads.
    "ASAN_OPTIONS": "handle_segv=0:detect_leaks=0:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.sanitize", description=__doc__.split("\n")[0])
    parser.add_argument("sanitizers", nargs="*", metavar="thread|address|undefined", help="default: all three")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each stress driver runs")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first round of the stress driver")
    parser.add_argument("--short", action="store_true", help="the stress driver only, with one compiler")
    given = parser.parse_args(arguments)
    unknown = set(given.sanitizers) - set(SANITIZERS)
    if unknown:
        parser.error(f"{', '.join(unknown)}: it must be of {', '.join(SANITIZERS)}")
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else [name for name in ("g++", "clang++") if shutil.which(name)]
    if not compilers:
        print("no C++ compiler was found (g++, clang++): install one, or name one in CXX")
        return 1
    failed = False
    for sanitizer in given.sanitizers or SANITIZERS:
        for compiler in compilers[:1] if given.short else compilers:
            failed |= not _timed(f"{sanitizer}, {compiler}, stress driver", _stress(compiler, sanitizer, given.seconds, given.seed))
        if not given.short:
            failed |= not _timed(f"{sanitizer}, native tests", _native_tests(sanitizer))
    return int(failed)


def _timed(what: str, run: Iterator[str]) -> bool:
    """Prints what ``run`` says; whether it came to its end without complaint."""
    began = time.monotonic()
    print(f"==== {what}", flush=True)
    try:
        for line in run:
            print(line, flush=True)
    except subprocess.CalledProcessError as error:
        print(f"==== FAILED after {time.monotonic() - began:.0f} s: {what}: {error}")
        return False
    print(f"==== ok after {time.monotonic() - began:.0f} s: {what}")
    return True


def _stress(compiler: str, sanitizer: str, seconds: float, seed: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as scratch:
        objects = []

        def compile_one(source: Path) -> None:
            output = Path(scratch) / f"{source.relative_to(ROOT).as_posix().replace('/', '_')}.o"
            objects.append(output)
            subprocess.run([compiler, *FLAGS, f"-fsanitize={sanitizer}", "-I", ROOT / "native", "-c", source, "-o", output], check=True)

        sources = [ROOT / "tests/native/stress.cpp", *sorted((ROOT / "native").rglob("*.cpp"))]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(compile_one, sources))
        program = Path(scratch) / "stress"
        subprocess.run([compiler, f"-fsanitize={sanitizer}", *objects, "-pthread", "-ldl", "-o", program], check=True)
        yield f"seed {seed}"
        environment = {**os.environ, **OPTIONS, "TMPDIR": scratch, "ASAN_OPTIONS": OPTIONS["ASAN_OPTIONS"].replace("detect_leaks=0:", "")}
        subprocess.run([program, str(seconds), str(seed)], check=True, env=environment)


def _native_tests(sanitizer: str) -> Iterator[str]:
    compiler = os.environ.get("CXX", "g++")
    try:
        found = subprocess.run([compiler, f"-print-file-name={RUNTIMES[sanitizer]}"], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        yield f"left out: no {compiler}"
        return
    runtime = Path(found.stdout.strip())
    if not runtime.is_absolute():
        yield f"left out: {compiler} has no {RUNTIMES[sanitizer]} that another program could load"
        return
    with tempfile.TemporaryDirectory() as scratch:
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, Path(scratch) / name, ignore=shutil.ignore_patterns("_native*", "__pycache__"))
            else:
                shutil.copy(ROOT / name, scratch)
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        environment = {**os.environ, "INFINITY_SANITIZE": sanitizer, "CXX": compiler}
        subprocess.run(build, cwd=scratch, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        reports = Path(scratch) / "reports"
        options = {name: f"{value}:log_path={reports}" for name, value in OPTIONS.items()}
        tests = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *LEFT_OUT[sanitizer], *TESTS],
            cwd=scratch,
            env={**os.environ, **options, "LD_PRELOAD": str(runtime), "PYTHONPATH": scratch},
        )
        found_any = False
        for path in sorted(Path(scratch).glob("reports*")):
            found_any = True
            yield path.read_text()
        if tests.returncode or found_any:
            raise subprocess.CalledProcessError(tests.returncode, "the tests, or the sanitizer, which reported what is above")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
