"""The floors: what may import what, and what ``import infinity`` costs and shows."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "infinity"


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def imports_of(path: Path) -> set[str]:
    """Every module that a file names in an import, and every name it takes from one, dotted."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return found


def importers_of(module: str) -> set[str]:
    return {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if module in imports_of(path)}


def test_the_import_contracts_of_pyproject_hold() -> None:
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    done = run_python("from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))")
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_native_imports_the_native_module() -> None:
    assert importers_of("infinity._native") <= {"native.py"}


@pytest.mark.parametrize("module", ["torch", "numpy", "pydantic", "cffi", "infinity._native"])
def test_import_infinity_does_not_load(module: str) -> None:
    done = run_python(f"import infinity, sys; print({module!r} in sys.modules)")
    assert done.stdout == "False\n", done.stdout + done.stderr


def test_import_infinity_starts_no_thread_and_prints_nothing() -> None:
    done = run_python("import infinity, threading; raise SystemExit(threading.active_count() - 1)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_public_name_can_be_had() -> None:
    done = run_python("import infinity; print([name for name in infinity.__all__ if getattr(infinity, name, None) is None])")
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_dir_shows_the_public_names_and_no_others() -> None:
    done = run_python("import infinity; print(sorted(dir(infinity)) == sorted(infinity.__all__))")
    assert done.stdout == "True\n", done.stdout + done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    done = run_python("import infinity; print(hasattr(infinity, 'initialise'))")
    assert done.stdout == "False\n", done.stdout + done.stderr


def test_models_know_nothing_of_infinity_but_its_words() -> None:
    allowed = ("infinity.models", "infinity.errors", "infinity.sizes")
    for path in (PACKAGE / "models").rglob("*.py"):
        foreign = {name for name in imports_of(path) if name.startswith("infinity") and not name.startswith(allowed)}
        assert not foreign, f"{path.name} imports {sorted(foreign)}"


def test_the_library_does_not_print() -> None:
    faces = {"cli", "report.py", "__main__.py"}
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in faces:
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text(), str(path))) if isinstance(node, ast.Call)]
        prints = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        assert not prints, f"{path.name} prints on line {prints}"
