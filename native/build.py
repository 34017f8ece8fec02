"""Builds ``infinity._native`` with cffi, out of line, from our own sources only.

``abi.h`` is the single declaration: cffi reads it here, and every C++ source includes it.
"""

import os
from pathlib import Path

from cffi import FFI

NATIVE = Path(__file__).resolve().parent

FLAGS = [
    "-std=c++17",
    "-O3",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-pthread",
]

# For `make sanitize`: thread, address or undefined.
SANITIZE = os.environ.get("INFINITY_SANITIZE")
SANITIZER_FLAGS = [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-g", "-O1"] if SANITIZE else []

PREAMBLE = """
#include <cstdint>
extern "C" {
#include "abi.h"
}
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#pragma GCC diagnostic ignored "-Wcast-function-type"
"""

ffi = FFI()
ffi.cdef((NATIVE / "abi.h").read_text().replace("#pragma once\n", ""))
ffi.set_source(
    "infinity._native",
    PREAMBLE,
    source_extension=".cpp",
    sources=sorted(path.relative_to(NATIVE.parent).as_posix() for path in NATIVE.rglob("*.cpp")),
    include_dirs=[NATIVE.relative_to(NATIVE.parent).as_posix()],
    depends=sorted(path.relative_to(NATIVE.parent).as_posix() for pattern in ("*.h", "*.hpp") for path in NATIVE.rglob(pattern)),
    extra_compile_args=FLAGS + SANITIZER_FLAGS,
    extra_link_args=["-pthread", "-ldl", *SANITIZER_FLAGS],
    py_limited_api=True,
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
