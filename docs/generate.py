"""Writes the generated pages of this folder: `make docs`. A test holds them to the code.

    python docs/generate.py [--check]
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import sys
import tomllib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np

import terrazzo as tz
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.description import avx2_spec
from terrazzo.compiler.levels import level_text
from terrazzo.compiler.lowering import Lowering
from terrazzo.dtypes import DType
from terrazzo.graph import described
from terrazzo.graph.ir import OPERATORS, Operator, TensorType
from terrazzo.graph.trace import trace
from terrazzo.knobs import knobs

HERE = Path(__file__).parent
ASM_MARK = "<!-- assembly of llvmlite "


# ---------------------------------------------------------------- how it works
@tz.op
def gelu(x):
    return 0.5 * x * (1 + tz.tanh(0.79788456 * (x + 0.044715 * x**3)))


def block(text: str, language: str = "") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def excerpt(text: str, first: str, lines: int) -> str:
    """Some lines of a long text from the first one that contains a given word."""
    rows = text.splitlines()
    start = next(i for i, row in enumerate(rows) if first in row)
    return "\n".join(rows[start:start + lines])


def how_it_works() -> str:
    graph, _ = trace(gelu, [TensorType((1024, 1024), tz.float32)], name="gelu", names=["x"])
    down = Lowering(graph, Cpu(avx2_spec(cores=2)))
    soft, _ = trace(tz.softmax, [TensorType((512, 1000), tz.float32)], name="softmax", names=["x"])
    rows = Lowering(soft, Cpu(avx2_spec(cores=2)))
    rules = [f"{a.rule}: {a.node}" for a in down.rewrites]
    asm = level_text(down, "asm")
    text = (HERE / "how-it-works.in.md").read_text()
    parts = {
        "GRAPH": block(str(down.source)),
        "REWRITES": block("\n".join(rules)),
        "CANONICAL": block(str(down.graph)),
        "EXPR": block(str(down.fused)),
        "SCHEDULE": block("\n".join(str(s) for _, s in down.scheduled)),
        "LOOP": block("\n\n".join(map(str, down.functions))),
        "LLVM": block(excerpt(level_text(down, "llvm"), ".task1.body(ptr noalias", 36), "llvm"),
        "ASM": f"{ASM_MARK}{llvmlite.__version__} -->\n" + block(
            excerpt(asm, "vmulps", 24), "asm"),
        "SOFTMAX_EXPR": block(str(rows.fused)),
        "SOFTMAX_LOOP": block("\n\n".join(map(str, rows.functions))),
    }
    for name, value in parts.items():
        text = text.replace("{{" + name + "}}", value)
    return text


README = "../README.md"


def readme() -> str:
    """README with what its example prints made again; the rest of it is written by hand."""
    graph, _ = trace(gelu, [TensorType((1024, 1024), tz.float32)], name="gelu")
    loops = level_text(Lowering(graph, Cpu(avx2_spec(cores=2))), "loop")
    return between((HERE / README).read_text(), "loop", block(loops) + "\n")


def triton_source() -> str:
    """The page on Triton source with its example made again; the rest is written by hand."""
    source = tz.softmax.lower(np.zeros((32, 1000), np.float32), "triton")
    page = (HERE / "triton-source.md").read_text()
    return between(page, "source", block(source, "python") + "\n")


def between(text: str, name: str, content: str) -> str:
    """A page with other content between the two marks of a name."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found, rest = text.partition(start)
    assert found and end in rest, f"there is no {start.strip()} with its end"
    return before + start + content + end + rest.partition(end)[2]


# ---------------------------------------------------------------- tables
def operators() -> str:
    lines = ["# Operators", "",
             "Generated from the registry by `make docs`. A composite operator is defined by "
             "others; a primitive gives its own expression or loops. *Gradient*: by rule, through "
             "its body, or none. Every operator runs at every level.", ""]
    families = sorted({op.family for op in OPERATORS.values()})
    for family in families:
        rows = sorted((op for op in OPERATORS.values() if op.family == family),
                      key=lambda op: op.name)
        if family in ("user", ""):
            continue
        lines += [f"## {family}", "", "| operator | meaning | kind | gradient |",
                  "|---|---|---|---|"]
        for op in rows:
            gradient = ("none" if not op.differentiable else "rule" if op.grad is not None
                        else "body" if op.body is not None else "none")
            kind = "composite" if op.body is not None else (
                "loops" if op.loops is not None else "host" if op.expr is None else op.kind)
            doc = op.doc.splitlines()[0].replace("|", "\\|") if op.doc else ""
            lines.append(f"| `{op.name}{signature(op)}` | {doc} | {kind} | {gradient} |")
        lines.append("")
    return "\n".join(lines)


def signature(op) -> str:
    return str(op.signature).replace("|", "\\|").replace(", /", "")


def knob_table() -> str:
    lines = ["# Knobs", "",
             "Every setting: as an environment variable, as `tz.knobs.name = value`, or in "
             "`with tz.knobs.override(name=value):`. Generated by `make docs`.", "",
             "| knob | variable | default | meaning |", "|---|---|---|---|"]
    for row in knobs.describe():
        default = "the user's cache folder" if row.name == "cache_dir" else row.default
        lines.append(f"| `{row.name}` | `{row.variable}` | {default} | {row.meaning} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- types
STUB = "../src/terrazzo/__init__.pyi"
STUB_HEAD = '''"""The names of terrazzo and their types. Generated by `make docs`."""

import os
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, overload

from terrazzo import errors as errors
from terrazzo import ort as ort
from terrazzo import te as te
from terrazzo.chips.chip import Chip as Chip
from terrazzo.chips.registry import Chips
from terrazzo.chips.registry import chip as chip
from terrazzo.chips.spec import ChipSpec as ChipSpec
from terrazzo.chips.spec import LaunchRules as LaunchRules
from terrazzo.tools.benchmark import BenchReport
from terrazzo.dtypes import DType
from terrazzo.index import Var
from terrazzo.graph.ir import Operator
from terrazzo.knobs import knobs as knobs
from terrazzo.runtime.executable import Executable
from terrazzo.tools.api import profile as profile
from terrazzo.base.shapes import dim as dim
from terrazzo.base.shapes import dims as dims
from terrazzo.tools.verify.report import Report
from terrazzo.version import __version__ as __version__

P = ParamSpec("P")
R = TypeVar("R")
State = TypeVar("State")
Result = TypeVar("Result")
Array: TypeAlias = Any  # of numpy, a tensor of torch, or a traced value; numbers where they fit
DTypeLike: TypeAlias = Any  # a name, or a type of terrazzo, numpy or torch
Size: TypeAlias = int | Var
Function: TypeAlias = Callable[..., Any]

class CompiledOf(Generic[P, R]):
    """A function that is called with certain arguments, and may write where `out` says."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, *args: Any, out: Any, **kwargs: Any) -> R: ...
    def tune(self, *args: Any, **kwargs: Any) -> str: ...

class OperatorOf(CompiledOf[P, R], Operator):
    """An operator that is called with certain arguments."""

    def __get__(self, owner: Any, kind: type | None = None) -> Any: ...
    def lower(self, *tensors_and_level: Any, chip: str = "", **attrs: Any) -> str: ...
    def verify(self, *tensors: Any, levels: Sequence[str] | None = None,
               dtypes: Sequence[Any] | None = None, kinds: Sequence[str] | None = None,
               seed: int = 0, **attrs: Any) -> Report: ...
    def bench(self, *tensors: Any, rounds: int | None = None, torch: bool = True,
              **attrs: Any) -> BenchReport: ...
    def compile(self, *tensors: Any, **attrs: Any) -> Executable: ...
    def on(self, chip: str) -> Callable[P, R]: ...

class _Chips:
    def __call__(self) -> Chips: ...
    def register(self, chip: Chip | type[Chip]) -> Chip: ...

chips: _Chips

def _operator(function: Callable[P, R]) -> OperatorOf[P, R]: ...
@overload
def op(function: Callable[P, R], *, name: str | None = None,
       grad: Callable[..., Any] | None = None, domain: str = "") -> OperatorOf[P, R]: ...
@overload
def op(function: None = None, *, name: str | None = None, grad: Callable[..., Any] | None = None,
       domain: str = "") -> Callable[[Callable[P, R]], OperatorOf[P, R]]: ...
def jit(function: Callable[P, R]) -> CompiledOf[P, R]: ...
def grad(function: Callable[P, Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
         ) -> Callable[P, Any]: ...
def value_and_grad(function: Callable[P, Any], argnums: int | Sequence[int] = 0,
                   has_aux: bool = False) -> Callable[P, tuple[Any, Any]]: ...
def vmap(function: Callable[P, R], in_axes: Any = 0, out_axes: Any = 0) -> Callable[P, R]: ...
'''
STUB_OWN = ("chip", "op", "jit", "grad", "value_and_grad", "vmap", "profile", "dim", "dims")


def stub() -> str:
    """Signatures for type checkers, which cannot see names that load lazily."""
    names = tz.public.NAMES
    lines = [STUB_HEAD.rstrip()]
    for name, value in names.items():
        if inspect.isfunction(value) and name not in STUB_OWN:
            shown = str(described.signature_of(value)).replace("~", "")
            doc = (inspect.getdoc(value) or "").splitlines()[0].replace('"', "'")
            lines += [f"def {name}{shown}:", f'    """{doc}"""']
    lines += [f"{name}: DType" for name, value in names.items() if isinstance(value, DType)]
    for name, value in sorted(names.items()):
        if isinstance(value, Operator):
            lines += _stub_of(name, value)
    return "\n".join(lines) + "\n"


def _stub_of(name: str, op: Operator) -> list[str]:
    shown = inspect.signature(op)
    params = list(shown.parameters.values())
    fronted = hasattr(op, "front")
    # Attributes may also be given in order, behind the tensors.
    free = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) if p.kind is p.KEYWORD_ONLY else p
            for p in params]
    if not fronted and not op.variadic:
        with contextlib.suppress(ValueError):  # one without a default behind one that has one
            shown = shown.replace(parameters=free)
    doc = op.doc.splitlines()[0].replace('"', "'").replace("\\", "")
    return ["@_operator", f"def {name}{shown}:", f'    """{doc}"""']


# ---------------------------------------------------------------- ONNX
OLDEST_OPSET = 7
DOMAINS = {"": "ai.onnx", "ai.onnx.ml": "ai.onnx.ml",
           "ai.onnx.preview.training": "ai.onnx.preview.training"}
REFERENCE_OPS = {"": "onnx.reference.ops", "ai.onnx.ml": "onnx.reference.ops.aionnxml",
                 "ai.onnx.preview.training": "onnx.reference.ops.aionnx_preview_training"}
ONNX_MARK = "<!-- operators of onnx "


def onnx_operators() -> str:
    import onnx
    from onnx import defs

    from terrazzo.frontends.onnx import convert
    from terrazzo.frontends.onnx.registry import MICROSOFT, converted_operators

    assert convert  # importing it registers the converters
    tables = {title: list(_schema_rows(domain)) for domain, title in DOMAINS.items()}
    counts: dict[str, int] = {}
    for _, versions, ways in tables["ai.onnx"]:
        counts[ways[0]] = counts.get(ways[0], 0) + len(versions)
    lines = [
        "# ONNX operators", "", f"{ONNX_MARK}{onnx.__version__} -->", "",
        f"Every operator of onnx {onnx.__version__} (ai.onnx up to opset "
        f"{defs.onnx_opset_version()}), in each of its versions that a model of opset "
        f"{OLDEST_OPSET} or later can use, and where terrazzo runs it. Generated from the registry "
        "by `make docs`.", "",
        "- **compiled**: has a converter, and becomes part of the model's machine code.",
        "- **function**: ONNX defines it by other operators, and those are compiled.",
        "- **host**: runs between compiled parts, because its output has no size before it runs, "
        "it holds strings, sequences or optionals, or it is control flow whose parts are "
        "compiled.",
        "- **reference**: `onnx.reference` runs it, in numpy, and a log line says so; with "
        "`CPUExecutionProvider` alone it is an error.",
        "- **no**: nothing runs it.", "",
        "*Otherwise* is what happens where the first way does not apply: a type, an attribute or "
        "an input that the converter does not take. `tz info model.onnx` tells of each node of a "
        "model.", "",
        "Versions of ai.onnx's operators: "
        + ", ".join(f"{way} {n}" for way, n in sorted(counts.items(), key=lambda c: -c[1]))
        + ".", ""]
    for title, rows in tables.items():
        lines += [f"## {title}", "", "| operator | versions | runs | otherwise |",
                  "|---|---|---|---|"]
        lines += [f"| {name} | {', '.join(map(str, versions))} | {ways[0]} | "
                  f"{''.join(ways[1:])} |" for name, versions, ways in rows]
        lines.append("")
    names = [name for domain, name in converted_operators() if domain == MICROSOFT]
    return "\n".join([*lines, f"## {MICROSOFT}", "",
                      "Compiled: " + ", ".join(names) + ". Others are unknown.", ""])


def _schema_rows(domain: str) -> Iterator[tuple[str, list[int], tuple[str, ...]]]:
    """Operators of a domain: the versions that run alike, and the ways to run them in order."""
    from onnx import defs

    history: dict[str, list[Any]] = {}
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == domain:
            history.setdefault(schema.name, []).append(schema)
    for name, schemas in sorted(history.items()):
        schemas.sort(key=lambda s: s.since_version)
        if not domain:
            oldest = max((s.since_version for s in schemas if s.since_version <= OLDEST_OPSET),
                         default=0)
            schemas = [s for s in schemas if s.since_version >= oldest]
        usable = [s for s in schemas if not s.deprecated]
        for ways, alike in groupby(usable, _ways_to_run):
            yield name, [s.since_version for s in alike], ways


def _ways_to_run(schema: Any) -> tuple[str, ...]:
    from terrazzo.frontends.onnx.registry import find
    from terrazzo.frontends.onnx.session.host import CONTROL
    from terrazzo.frontends.onnx.session.host_ops import HOST_OPS

    domain, name = schema.domain, schema.name
    opset = schema.since_version if domain else max(schema.since_version, OLDEST_OPSET)
    converter = find(domain, name, opset)
    # One that never returns is there to say why not.
    compiled = (not domain and name in ("Shape", "Size")) or (
        converter is not None
        and getattr(converter.function, "__annotations__", {}).get("return") != "NoReturn")
    if (domain, name) in HOST_OPS or (not domain and name in CONTROL):
        otherwise = ["host"]
    elif schema.has_function or schema.has_context_dependent_function:
        otherwise = ["function"]
    else:
        otherwise = ["reference"] if _has_reference(domain, name, opset) else []
    return ("compiled", *otherwise) if compiled else (*otherwise, "no")[:1]


def _has_reference(domain: str, name: str, opset: int) -> bool:
    try:
        importlib.import_module(REFERENCE_OPS[domain]).load_op(domain, name, opset)
    except Exception:  # onnx raises several kinds for what it does not have
        return False
    return True


# ---------------------------------------------------------------- Triton
TRITON_MARK = "<!-- language of triton "


def triton_cpu() -> str:
    """The page on Triton with its tables made again; the rest of it is written by hand."""
    text = (HERE / "triton-cpu.md").read_text()
    suite = tomllib.loads((HERE / "triton_suite.toml").read_text())
    for name, table in (("language", triton_language()), ("operations", triton_operations()),
                        ("suite", triton_suite(suite)), ("failing", triton_failing(suite))):
        text = between(text, name, table)
    return text


def triton_language() -> str:
    """Every public function of Triton's language by families, and why some are refused."""
    import triton

    sys.path.insert(0, str(HERE))
    import triton_language as language

    assert not language.forgotten(), f"docs/triton_language.py lacks {language.forgotten()}"
    refused = language.tried()
    lines = [f"{TRITON_MARK}{triton.__version__} -->", "", "| family | functions |", "|---|---|"]
    for family, functions in language.FAMILIES.items():
        works = [f"`{name}`" for name in functions if refused.get(name) == ""]
        lines.append(f"| {family} | {', '.join(works)} |")
    lines.append(f"| types | {', '.join(f'`{name}`' for name in language.types())} |")
    lines += ["", "| refused | because |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in refused.items() if why]
    return "\n".join(lines) + "\n"


def triton_operations() -> str:
    """The operations of TTIR that have a handler, by dialects, and the functions of libdevice."""
    from terrazzo.triton_cpu import frontend as room
    from terrazzo.triton_cpu.frontend.elementwise import RULES
    from terrazzo.triton_cpu.frontend.externals import FUNCTIONS
    from terrazzo.triton_cpu.frontend.ptx.run import INSTRUCTIONS

    families = [importlib.import_module(f"{room.__name__}.{module.name}")
                for module in pkgutil.iter_modules(room.__path__)
                if module.name.startswith("lower")]
    names = sorted({*RULES, *(name for family in families for name in family.HANDLERS)})
    names = [name for name in names if not name.startswith("ptx.")]  # made while reading
    lines = ["| dialect | operations |", "|---|---|"]
    for dialect, group in groupby(names, lambda name: name.partition(".")[0]):
        lines.append(f"| `{dialect}` | {', '.join(n.partition('.')[2] for n in group)} |")
    lines.append(f"| `libdevice` | {', '.join(sorted(FUNCTIONS))} |")
    lines.append(f"| `ptx` (see below) | {', '.join(sorted(INSTRUCTIONS))} |")
    return "\n".join(lines) + "\n"


def triton_suite(suite: dict[str, Any]) -> str:
    """What passes of Triton's own tests."""
    lines = [f"Triton {suite['triton']}:", "", "| file | cases | passed | skipped by the suite | "
             "failed |", "|---|---|---|---|---|"]
    for row in suite["file"]:
        counts = [str(row.get(key, "?")) for key in ("cases", "passed", "skipped", "failed")]
        lines.append(f"| {row['name']} | {' | '.join(counts)} |")
    return "\n".join(lines) + "\n"


def triton_failing(suite: dict[str, Any]) -> str:
    """What does not pass of Triton's own tests, and why."""
    lines = ["| tests | how many | why not |", "|---|---|---|"]
    lines += [f"| {row['tests']} | {row.get('count', '?')} | {row['why']} |"
              for row in suite["failing"]]
    return "\n".join(lines) + "\n"


PAGES = {README: readme, STUB: stub, "triton-source.md": triton_source,
         "how-it-works.md": how_it_works, "operators.md": operators, "knobs.md": knob_table,
         "onnx-operators.md": onnx_operators, "triton-cpu.md": triton_cpu}


def of_another_version(page: str) -> bool:
    """Whether a page was made with another onnx or Triton, and so cannot be compared."""
    for mark, package in ((ONNX_MARK, "onnx"), (TRITON_MARK, "triton")):
        if mark in page:
            made_with = page.partition(mark)[2].partition(" ")[0]
            return bool(made_with != importlib.import_module(package).__version__)
    return False


def comparable(text: str) -> str:
    """A page without its assembly, which changes with LLVM and not with us."""
    if ASM_MARK not in text:
        return text
    head, _, tail = text.partition(ASM_MARK)
    return head + tail.partition("```\n")[2].partition("```\n")[2]


def main() -> int:
    stale = []
    for name, make in PAGES.items():
        path, text = HERE / name, make()
        if "--check" in sys.argv:
            stored = path.read_text() if path.exists() else ""
            if comparable(stored) != comparable(text) and not of_another_version(stored):
                stale.append(name)
        else:
            path.write_text(text)
    if stale:
        print(f"stale: {', '.join(stale)}; run make docs")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
