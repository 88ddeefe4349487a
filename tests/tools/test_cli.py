"""The command `tz`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import terrazzo as tz
from terrazzo.errors import ArgumentError, UnknownOperator
from terrazzo.tools.cli import commands as cli

SOURCE = '''
import terrazzo as tz

@tz.op
def cli_gelu(x):
    return 0.5 * x * (1 + tz.tanh(0.79788456 * (x + 0.044715 * x * x * x)))

@tz.jit
def cli_scaled(x, w):
    return x * w

@tz.op
def cli_wrong(x, y):
    return tz.matmul(x, y) + tz.ones(shape=(5, 5))
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my_operators.py"
    path.write_text(SOURCE)
    return str(path)


def run(*args: str) -> str:
    result = CliRunner().invoke(cli.app, args, catch_exceptions=False, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def shell(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    package = str(Path(tz.__file__).parents[1])
    return subprocess.run([sys.executable, "-m", "terrazzo", *args], capture_output=True,
                          text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": package, **variables})


def test_help_names_every_command() -> None:
    text = run("--help")
    for command in ("info", "ops", "lower", "verify", "bench", "fuzz", "cache", "knobs"):
        assert command in text
    assert "file.py::name" in run("lower", "--help")


def test_version() -> None:
    assert run("--version").strip() == f"terrazzo {tz.__version__}"


def test_attributes() -> None:
    assert "sum(x0, axis=0" in run("lower", "sum", "-s", "3,4", "-l", "graph", "-a", "axis=0")
    text = run("lower", "gelu", "-s", "8", "-l", "graph", "--attr", "approximate=tanh")
    assert "approximate=tanh" in text
    assert "every level agrees" in run(
        "verify", "sum", "-s", "3,4", "-t", "float32", "-l", "expr", "-a", "dim=1")


@pytest.mark.parametrize(("given", "message"), [
    ("axis", "'axis' is not an attribute"), ("axes=1", "sum has no attribute 'axes'"),
    ("axis=7", "axis 7"), ("axis=left", "axis"),
])
def test_attributes_that_are_none(given: str, message: str) -> None:
    done = shell("lower", "sum", "-s", "3,4", "-a", given)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_info_and_knobs() -> None:
    assert tz.__version__ in run("info")
    assert "TZ_THREADS" in run("knobs")


def test_families_that_do_not_exist(file: str) -> None:
    run("lower", f"{file}::cli_gelu", "-s", "3", "-l", "graph")
    with pytest.raises(ArgumentError, match=r"(?s)no family 'nofam'.*try: activation, "):
        run("ops", "nofam")


def test_operators_are_listed() -> None:
    text = run("ops", "norm")
    assert "softmax(x, *, axis=-1)" in text and "matmul" not in text
    with pytest.raises(ArgumentError, match="no family 'nrom'"):
        run("ops", "nrom")


@pytest.mark.parametrize(("level", "expected"), [
    ("graph", "cli_gelu(x0)"), ("expr", "program k_multiply"), ("loop", "vector for"),
    ("llvm", "define"),
])
def test_lower(file: str, level: str, expected: str) -> None:
    assert expected in run("lower", f"{file}::cli_gelu", "--shape", "8,8", "--level", level)


def test_lower_takes_functions_and_built_in_operators(file: str) -> None:
    text = run("lower", f"{file}::cli_scaled", "-s", "4x8", "-s", "8", "-t", "f16", "-l", "graph")
    assert "x0: f16[4, 8], x1: f16[8]" in text
    assert "softmax(" in run("lower", "softmax", "--shape", "4,4", "-l", "graph")


def test_verify(file: str) -> None:
    text = run("verify", f"{file}::cli_gelu", "-t", "float32", "-l", "expr", "-l", "code")
    assert "cli_gelu: every level agrees" in text and "float32" in text


def test_bench(file: str) -> None:
    text = run("bench", f"{file}::cli_gelu", "--shape", "8,8", "--no-torch")
    assert "cli_gelu(f32[8, 8])" in text and "of roofline" in text


def test_fuzz_says_how_much_it_did() -> None:
    assert "programs in" in run("fuzz", "--minutes", "0.01", "--seed", "11")


def test_cache(tmp_path: Path) -> None:
    with tz.knobs.override(cache_dir=str(tmp_path), cache=True):
        entry = tmp_path / "ab" / "cd.tzc"
        entry.parent.mkdir()
        entry.write_bytes(bytes(3 << 20))
        assert "3.0 MiB" in run("cache", "size")
        assert "removed 3.0 MiB" in run("cache", "clear")
        assert not entry.exists()


# ---------------------------------------------------------------- mistakes
@pytest.mark.parametrize(("target", "message"), [
    ("nowhere.py::f", "there is no file 'nowhere.py'"),
])
def test_files_that_do_not_exist(target: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        cli.find(target)


def test_names_that_do_not_exist(file: str) -> None:
    with pytest.raises(ArgumentError, match="defines no 'gelo'") as caught:
        cli.find(f"{file}::gelo")
    assert "cli_gelu" in (caught.value.hint or "")
    with pytest.raises(UnknownOperator, match="sofmax"):
        cli.find("sofmax")


@pytest.mark.parametrize("text", ["a,b", "3,-1", "1.5"])
def test_shapes_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not a shape"):
        cli.parse_shape(text)


@pytest.mark.parametrize(("text", "shape"), [
    ("8,16", (8, 16)), ("8x16", (8, 16)), ("()", ()), ("(3,)", (3,)), (" 4 ", (4,))])
def test_shapes(text: str, shape: tuple[int, ...]) -> None:
    assert cli.parse_shape(text) == shape


def test_errors_are_one_message_without_a_traceback(file: str) -> None:
    done = shell("lower", f"{file}::cli_wrong", "--shape", "3,4")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("ShapeError: matmul of [3, 4] and [3, 4]")
    assert "where:" in done.stderr and "my_operators.py" in done.stderr
    assert "try:" in done.stderr and "Traceback" not in done.stderr


def test_debugging_shows_the_traceback() -> None:
    for done in (shell("--debug", "lower", "sofmax", "--shape", "3"),
                 shell("lower", "sofmax", "--shape", "3", TZ_DEBUG="1")):
        assert done.returncode == 1
        assert "Traceback" in done.stderr and "UnknownOperator" in done.stderr
