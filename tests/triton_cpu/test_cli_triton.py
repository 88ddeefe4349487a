"""`tz triton` shows kernels at every level, and says what is wrong with what it was given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from terrazzo.errors import ArgumentError, MissingDependency
from terrazzo.tools.cli import commands as cli
from terrazzo.tools.cli import triton as cli_triton

pytest.importorskip("torch")

pytestmark = [pytest.mark.triton, pytest.mark.torch]

PROGRAM = '''
import sys
import torch
import triton
import triton.language as tl

@triton.jit
def half(x):
    return x / 2

@triton.jit
def scale_kernel(x, out, n, BLOCK: tl.constexpr, TYPE: tl.constexpr = tl.float32):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, half(tl.load(x + at, mask=at < n)).to(TYPE), mask=at < n)

@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 32})], key=["n"])
@triton.jit
def tuned_kernel(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 1.0, mask=at < n)

def launch_tuned():
    x = torch.zeros(100)
    tuned_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, 100)

def nested():
    @triton.jit
    def inner_kernel(x):
        tl.store(x, 1.0)
    inner_kernel[(1,)](torch.zeros(1))

if __name__ == "__main__":
    print("the program says hello")
    x, out = torch.ones(100), torch.zeros(100)
    block = int(sys.argv[1]) if len(sys.argv) > 1 else 128
    scale_kernel[(1,)](x, out, 100, BLOCK=block)
    raise AssertionError("the program goes on after the launch")
'''


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "program", raising=False)
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def tz(*words: object) -> str:
    """What `tz triton` prints to stdout; errors of terrazzo come through."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["triton", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


# ---------------------------------------------------------------- what it shows
def test_kernels_are_listed_without_running(program: Path) -> None:
    text = tz(program)
    rows = {cells[1]: cells[2:] for line in text.splitlines()
            if len(cells := [c.strip() for c in line.split("│")]) > 3}
    assert list(rows) == ["half", "scale_kernel", "tuned_kernel", "inner_kernel"]
    assert rows["scale_kernel"][1:4] == ["x, out, n", "BLOCK, TYPE", "jit"]
    assert rows["tuned_kernel"][3] == "autotune, jit"


def test_levels_of_a_launch(program: Path) -> None:
    text = tz(f"{program}::scale_kernel", "--show", "ttir,loop,llvm,asm")
    title = "# scale_kernel(x: *fp32, out: *fp32, n: i32, BLOCK=128, TYPE=fp32)"
    parts = [part.strip() for part in text.split(title)]
    assert [part.split("\n")[0] for part in parts] == ["", ": ttir", ": loop", ": llvm", ": asm"]
    assert "tt.load" in parts[1] and "loc(" not in parts[1]
    assert "kernel scale_kernel(x: f32[]" in parts[2]
    assert "define " in parts[3] and ".text" in parts[4]
    assert "hello" not in text


def test_the_program_gets_its_arguments(program: Path) -> None:
    assert "BLOCK=256" in tz(f"{program}::scale_kernel", "256")


def test_a_function_may_launch_instead(program: Path) -> None:
    assert "tuned_kernel(x: *fp32, n: i32, BLOCK=64)" in tz(
        f"{program}::tuned_kernel", "--run", "launch_tuned")
    assert "kernel inner_kernel" in tz(f"{program}::inner_kernel", "--run", "nested")


def test_types_by_hand(program: Path) -> None:
    text = tz(f"{program}::scale_kernel", "--signature", "*fp16:16, *bf16, i64",
              "--constexpr", "BLOCK=64", "--constexpr", "TYPE=tl.bfloat16", "--show", "ttir")
    assert "x: *fp16, out: *bf16, n: i64, BLOCK=64" in text
    assert "%x: !tt.ptr<f16> {tt.divisibility = 16 : i32}" in text
    assert "TYPE=fp32" in tz(f"{program}::scale_kernel", "--signature", "*fp32,*fp32,i32",
                             "--constexpr", "BLOCK=64")
    assert "BLOCK=16" in tz(f"{program}::tuned_kernel", "--signature", "*fp32,i32",
                            "--constexpr", "BLOCK=16")


# ---------------------------------------------------------------- mistakes
@pytest.mark.parametrize("words, message", [
    (["{}::scale"], "has no kernel `scale`\n  try: it has half, scale_kernel, tuned_kernel"),
    (["{}::nested"], "ordinary function, not a Triton kernel\n  where: {}:26\n  try: decorate it "
                     "with @triton.jit, or choose from half"),
    (["{}::half", "--run", "nested"],
     "without launching `half`; it launched inner_kernel\n  try: name a function"),
    (["{}::tl", "--run", "launch_nothing"], "no function `launch_nothing` to run"),
    (["{}::scale_kernel", "--show", "ptx"], "no level 'ptx'\n  try: choose from ttir, loop, llvm"),
    (["{}::scale_kernel", "--constexpr", "BLOCK=3"], "--constexpr goes with --signature"),
    (["{}::scale_kernel", "--signature", "*fp32"], "needs a value for its constant `BLOCK`"),
    (["{}::scale_kernel", "--signature", "*fp32", "--constexpr", "BLOCK=16"],
     "gives 1 types, but `scale_kernel` has 3 arguments\n  try: give one for each of x, out, n"),
    (["{}::scale_kernel", "--signature", "float,*fp32,i32", "--constexpr", "BLOCK=16"],
     "'float' is not a type\n  try: write a star for pointers, then one of i1, i8"),
    (["{}::scale_kernel", "--signature", "*fp32", "--constexpr", "BLOCK"],
     "'BLOCK' is not a constant\n  try: write it as BLOCK=1024"),
    (["{}::scale_kernel", "--signature", "*fp32", "--constexpr", "SIZE=3"],
     "has no parameter `SIZE`\n  try: it has x, out, n, BLOCK, TYPE"),
    (["{}::inner_kernel", "--signature", "*fp32"], "no kernel at the top of"),
])
def test_mistakes(program: Path, words: list[str], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        tz(*(word.replace("{}", str(program)) for word in words))
    assert message.replace("{}", str(program)) in str(caught.value)


def test_no_such_file() -> None:
    with pytest.raises(ArgumentError, match=r"there is no file 'nowhere\.py'"):
        tz("nowhere.py::kernel")


def test_files_without_kernels(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(ArgumentError, match=r"empty\.py has no kernels"):
        tz(tmp_path / "empty.py")
    with pytest.raises(ArgumentError, match=r"broken.py is not Python: .*\n.*broken.py:1"):
        tz(tmp_path / "broken.py")


def test_triton_is_not_installed(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingDependency, match=r'pip install "terrazzo\[triton\]"'):
        cli_triton.use_cpu_backend()
    assert "scale_kernel" in tz(program)  # listing needs no Triton
