"""The command line as a whole."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import infinity
from infinity.cli import app
from infinity.cli.outcome import errors_as_messages
from infinity.errors import ConfigError, ConfigProblem


def test_the_version_is_printed() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"infinity {infinity.__version__}\n")


def test_help_names_every_option_of_train() -> None:
    done = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    assert done.exit_code == 0
    options = (
        "--layers --heads --width --context --batch --steps --seed --data --metrics --sample-bytes --meta --no-meta "
        "--checkpoint-activations --io-trace --json --traceback"
    )
    assert [option for option in options.split() if option not in done.stdout] == []


def test_help_does_not_load_torch() -> None:
    code = "import sys; from infinity.cli import app; app(['train', '--help'], standalone_mode=False); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_an_error_of_infinity_is_a_message_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as left, errors_as_messages(traceback=False):
        raise ConfigError([ConfigProblem("a.b", "is wrong"), ConfigProblem("c", "is missing")])
    assert left.value.exit_code == 1
    assert capsys.readouterr().err == "error: 2 problems in the config:\n  a.b: is wrong\n  c: is missing\n"


def test_an_error_of_infinity_passes_where_its_traceback_is_asked_for() -> None:
    with pytest.raises(ConfigError), errors_as_messages(traceback=True):
        raise ConfigError([])


def test_any_other_error_passes() -> None:
    with pytest.raises(ZeroDivisionError), errors_as_messages(traceback=False):
        raise ZeroDivisionError


def test_an_interrupt_is_exit_code_130() -> None:
    with pytest.raises(typer.Exit) as left, errors_as_messages(traceback=False):
        raise KeyboardInterrupt
    assert left.value.exit_code == 130
