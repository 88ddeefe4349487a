"""Choices for kernels of a GPU: spaces of them, measuring, what is kept, and what is shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cuda import driver, tune
from terrazzo.chips.cuda.binaries import compiled
from terrazzo.chips.cuda.choices import Space
from terrazzo.chips.cuda.description import h100
from terrazzo.chips.cuda.forms import Form, form_of, space_of
from terrazzo.chips.registry import chip_for
from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.errors import TerrazzoError
from terrazzo.expr.ir import Program
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.index import Var
from terrazzo.knobs import knobs
from terrazzo.runtime.tuned import Measured, database, program_key

pytest.importorskip("triton")
pytest.importorskip("torch")
pytestmark = [pytest.mark.triton, pytest.mark.torch]
X = np.random.default_rng(0).standard_normal((48, 256), np.float32)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "choices.json"
    with knobs.override(cuda_simulate=True, chip="cuda", tune_db=str(path)):
        yield path


def program_for(function: Callable[..., Any], *shapes: Any, dtype: Any = tz.float32) -> Program:
    graph, _ = trace(function, [TensorType(s, dtype) for s in shapes], name="f")
    options = Options.now()
    found = [g.program for g in Lowering(graph, options.chip, options=options).fused.groups]
    if len(found) > 1:  # what changes an order of axes beside a convolution
        found = [p for p in found if p.kind == "contraction"]
    (program,) = found
    return program


def space_for(program: Program) -> tuple[Space, Form]:
    spec = chip_for(knobs.now).spec
    form = form_of(program, spec)
    space = space_of(program, spec, form)
    assert space is not None
    return space, form


def entry(choice: dict[str, int]) -> Measured:
    return Measured(choice, 1e-6, 2e-6, "a program")


class Clock:
    """Stands in for the time that kernels take: what is preferred is the quickest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, preferred: dict[str, int]):
        self.asked = 0
        self.preferred = preferred
        monkeypatch.setattr(tune.Bench, "seconds", self.seconds)

    def seconds(self, form: Form) -> float:
        self.asked += 1
        written = form.kernels[0].written
        found = {"warps": written.warps, **{k.lower(): v for k, v in written.constants.items()}}
        return 1.0 if all(found[k] == v for k, v in self.preferred.items()) else 2.0


# ---------------------------------------------------------------- choosing
def test_what_was_measured_is_kept_shown_and_run(file: Path, monkeypatch: pytest.MonkeyPatch
                                                 ) -> None:
    assert tz.gelu.lower(X, "triton").startswith("# block 1024, warps 4: by rule\n")
    Clock(monkeypatch, {"block": 4096, "warps": 16})
    said = tz.gelu.tune(X)
    assert "f32[48, 256]" in said and "block 4096, warps 16" in said
    assert tz.gelu.lower(X, "triton").startswith("# block 4096, warps 16: measured, ")
    (kernel,) = tz.gelu.compile(X).artifact.made.facts["kernels"]
    (version,) = kernel["versions"]
    assert version["constants"] == {"BLOCK": 4096} and version["warps"] == 16
    np.testing.assert_allclose(tz.gelu(X), tz.gelu.on("cpu")(X), rtol=1e-5, atol=1e-6)
    kept = json.loads(file.read_text())
    assert kept["version"] == 1 and list(kept["chips"]) == ["cuda h200, simulated"]


def test_a_call_after_tuning_runs_what_was_chosen(file: Path, monkeypatch: pytest.MonkeyPatch
                                                  ) -> None:
    @tz.op
    def plus_one(x: Any) -> Any:
        return x + 1

    loaded: list[dict[str, Any]] = []
    load = type(chip_for(knobs.now)).load
    monkeypatch.setattr(type(chip_for(knobs.now)), "load", lambda self, name, made, constants: (
        loaded.append(made.facts["kernels"][0]["versions"][0]), load(self, name, made, constants)
    )[1])
    plus_one(X)
    Clock(monkeypatch, {"block": 512, "warps": 2})
    plus_one.tune(X)
    np.testing.assert_array_equal(plus_one(X), X + 1)
    assert loaded[0]["constants"] == {"BLOCK": 1024}
    assert loaded[-1]["constants"] == {"BLOCK": 512} and loaded[-1]["warps"] == 2


def test_measured_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, {"warps": 8})
    graph, _ = trace(lambda x: tz.softmax(x), [TensorType((48, 256), tz.float32)], name="f")
    compile_graph(graph)
    assert clock.asked == 0
    with knobs.override(tune=True):
        compile_graph(graph)
        first = clock.asked
        assert first > 1
        compile_graph(graph)
        compile_graph(trace(lambda x: tz.softmax(x), [TensorType((Var("n"), 256), tz.float32)],
                            name="f")[0])  # sizes that vary go by rule
    assert clock.asked == first
    tz.softmax.tune(X)
    assert clock.asked > first  # asked for again


def test_equal_layers_are_measured_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, {"warps": 8})
    tz.softmax.tune(X)
    alone, clock.asked = clock.asked, 0
    tz.jit(lambda x: tz.softmax(tz.softmax(tz.softmax(x)))).tune(X)
    assert clock.asked == alone


def test_nothing_to_choose(file: Path) -> None:
    assert tz.cumsum.tune(X, axis=0) == ""  # its kernels go by rule
    assert tz.exp.tune(np.ones((0, 4), np.float32)) == ""
    with tz.chip("cpu"):
        assert tz.exp.tune(X) == ""
    assert not file.exists()


@pytest.mark.parametrize("call", [
    lambda x: tz.sum(x[0, :10]), lambda x: x[:3, :5] @ x[:5, :7], lambda x: tz.exp(x[0, 0]),
    lambda x: x[:1, :64] @ x[:40, :64].T, lambda x: tz.sum(x[:2, :3], axis=1)])
def test_small_sizes(file: Path, call: Callable[..., Any]) -> None:
    run = tz.jit(call)
    with tz.chip("cpu"):
        want = run(X)
    run.tune(X)
    np.testing.assert_allclose(run(X), want, rtol=1e-4, atol=1e-5)


def test_another_process_reads_it(file: Path) -> None:
    """By the clock, and then found by program, size and chip."""
    said = tz.softmax.tune(X)
    (found,) = json.loads(file.read_text())["chips"]["cuda h200, simulated"].values()
    assert found["text"] in said and found["seconds"] <= found["by_rule"]
    script = """
import numpy as np, terrazzo as tz
from terrazzo.knobs import knobs
for simulate, shape in ((True, (48, 256)), (True, (48, 255)), (False, (48, 256))):
    with knobs.override(cuda_simulate=simulate):
        text = tz.softmax.lower(np.zeros(shape, np.float32), "triton", chip="cuda")
        print(text.splitlines()[0])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          check=True, env={**os.environ, "TZ_TUNE_DB": str(file)})
    same, size, chip = done.stdout.splitlines()
    choice = ", ".join(f"{k} {v}" for k, v in found["choice"].items())
    assert same.startswith(f"# {choice}: measured")
    assert size.endswith(": by rule") and chip.endswith(": by rule")


def test_chips_have_choices_of_their_own(file: Path) -> None:
    program = program_for(lambda x: tz.exp(x), (48, 256))
    chip: Any = chip_for(knobs.now)
    database().keep(chip.tunes, program_key(program), entry({"block": 512, "warps": 4}))
    other = type(chip)(h100(), simulated=True)
    assert chip.form(program).choice == {"block": 512, "warps": 4}
    assert other.form(program).choice is None and other.form(program).key


# ---------------------------------------------------------------- spaces
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "pointwise": (lambda x: tz.gelu(x), ((37, 130),), tz.float32),
    "rows": (lambda x: tz.softmax(x), ((5, 5000),), tz.float32),
    "columns": (lambda x: tz.sum(x, axis=0), ((90, 70),), tz.float32),
    "short rows": (lambda x: tz.softmax(x), ((600, 20),), tz.float32),
    "product": (lambda x, y: tz.gelu(x @ y), ((130, 256), (256, 144)), tz.bfloat16),
    "few rows": (lambda x, y: x @ y, ((3, 512), (512, 80)), tz.float32),
    "one row": (lambda x, y: x @ tz.permute_dims(y, axes=(1, 0)), ((1, 512), (80, 512)),
                tz.float32),
    "convolution": (lambda x, w: tz.relu(tz.conv(x, w, padding=1)),
                    ((2, 16, 10, 12), (24, 16, 3, 3)), tz.float32),
    "image": (lambda x, w: tz.convolve(x, w, strides=(1, 1), padding=((1, 1), (1, 1)),
                                       dilation=(1, 1)),
              ((1, 64, 66, 16), (3, 3, 16, 24)), tz.bfloat16),
    "attention": (lambda q: tz.scaled_dot_product_attention(q, q, q, causal=True),
                  ((2, 2, 150, 32),), tz.float32),
    "decoding": (lambda q, k: tz.scaled_dot_product_attention(q, k, k),
                 ((1, 4, 1, 64), (1, 2, 300, 64)), tz.bfloat16),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_value_computes_the_same(file: Path, name: str) -> None:
    function, shapes, dtype = PROGRAMS[name]
    program = program_for(function, *shapes, dtype=dtype)
    space, by_rule = space_for(program)
    chip: Any = chip_for(knobs.now)
    bench = tune.Bench.of(program, chip)
    bench.seconds(by_rule)
    assert bench.wanted is not None and any(np.ptp(w) > 0 for w in bench.wanted)
    tried = 0
    for axis in space.axes:
        changed = space.changed(space.rule, axis)
        for choice in changed[:1] + changed[-1:]:
            assert space.holds(choice)
            bench.seconds(form_of(program, chip.spec, choice))  # raises where results differ
            tried += 1
    assert tried >= 2


def test_choices_differ_in_their_kernels(file: Path) -> None:
    program = program_for(*PROGRAMS["product"][:1], *PROGRAMS["product"][1], dtype=tz.bfloat16)
    space, _ = space_for(program)
    spec = chip_for(knobs.now).spec
    for change, shown in (({"parts": 2}, "_parts("), ({"persistent": True}, "flatten=True"),
                          ({"descriptors": True}, "make_tensor_descriptor")):
        choice = {**space.rule, **change}
        assert space.holds(choice)
        kernel = form_of(program, spec, choice).kernels[0]
        assert shown in kernel.versions[0].written.jit_text()
    assert not space.holds({**space.rule, "parts": 2, "descriptors": True})
    assert not space.holds({**space.rule, "rows": 100})
    assert not space.holds({**space.rule, "stages": 5, "depth": 256, "rows": 128, "columns": 256})
    assert not space.holds({"block": 1024, "warps": 4})


@pytest.mark.parametrize(("name", "change"), [
    ("product", {"persistent": True, "descriptors": True}), ("product", {"parts": 2}),
    ("product", {"rows": 128, "columns": 128, "warps": 8, "persistent": True}),
    ("rows", {"block": 2048, "warps": 8}), ("columns", {"rows": 64, "warps": 2}),
    ("attention", {"rows": 128, "keys": 64, "warps": 8}), ("decoding", {"parts": 2})])
def test_choices_compile_for_a_gpu(file: Path, name: str, change: dict[str, int]) -> None:
    function, shapes, dtype = PROGRAMS[name]
    program = program_for(function, *shapes, dtype=dtype)
    space, _ = space_for(program)
    choice = {**space.rule, **change}
    assert space.holds(choice)
    spec = chip_for(knobs.now).spec
    for kernel in form_of(program, spec, choice).kernels:
        version, types = kernel.versions[0], [t.dtype for t in kernel.tensors]
        made = compiled(version.written, types, version.constants(), version.warps,
                        [True] * len(types), version.sixteen, spec)
        assert f".reqntid {32 * version.warps}" in made.ptx and made.cubin


def test_what_computes_something_else_is_not_chosen(file: Path, monkeypatch: pytest.MonkeyPatch
                                                    ) -> None:
    program = program_for(lambda x: tz.exp(x), (48, 256))
    space, by_rule = space_for(program)
    chip: Any = chip_for(knobs.now)
    bench = tune.Bench.of(program, chip)
    bench.seconds(by_rule)
    assert bench.wanted is not None
    bench.seconds(by_rule)
    bench.wanted[0][7] *= 1.01
    with pytest.raises(TerrazzoError, match="not what the rules' kernel computes"):
        bench.seconds(by_rule)
    compare, compared = tune.Bench.compare, []

    def spoiled(self: tune.Bench) -> None:
        compared.append(self)
        for output in self.copies[0][1] if len(compared) > 1 else ():
            output.view(np.float32)[-1] = np.nan
        compare(self)

    monkeypatch.setattr(tune.Bench, "compare", spoiled)
    assert tune._measured(program, chip, by_rule, space).choice == space.rule
    assert len(compared) > 4


@pytest.mark.gpu
@pytest.mark.skipif(bool(driver.absence()), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    import torch

    x, w = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)
    calls = [(tz.gelu, (x,), torch.nn.functional.gelu), (tz.matmul, (x, w), torch.matmul),
             (tz.softmax, (x,), lambda x: torch.softmax(x, -1)),
             (tz.scaled_dot_product_attention, (q, q, q),
              torch.nn.functional.scaled_dot_product_attention)]
    with knobs.override(tune_db=str(tmp_path / "choices.json")):
        for ours, args, theirs in calls:
            assert " us (by rule " in ours.tune(*args)
            torch.testing.assert_close(ours(*args), theirs(*args), rtol=2e-2, atol=2e-1)
            assert ": measured, " in ours.lower(*args, "triton", chip="cuda").splitlines()[0]
    (chip,) = json.loads((tmp_path / "choices.json").read_text())["chips"].values()
    assert len(chip) == 4 and all(f["seconds"] <= f["by_rule"] for f in chip.values())


def test_what_a_file_says_is_checked(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = program_for(lambda x: tz.exp(x), (48, 256))
    chip: Any = chip_for(knobs.now)
    for wrong in ({"block": 1000, "warps": 4}, {"block": 1024}, {"rows": 64, "warps": 4},
                  {"block": 1024, "warps": 0}):
        database().keep(chip.tunes, program_key(program), entry(wrong))
        form = tune.form_for(program, chip)
        assert form.choice is None and form.remark.endswith(": by rule")
    assert "is no choice of this version" in caplog.text
