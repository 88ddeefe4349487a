"""Every setting of terrazzo: typed, read from TZ_* variables, overridable in a `with`.

    from terrazzo.knobs import knobs

    knobs.threads                       # a plain attribute: read it at every call
    with knobs.override(threads=1): ...
    knobs.now                           # all settings at this moment, as a value that stays

What steers runs (threads, spin, profile) is process-wide, overrides included, as is what it
steers: one pool. What steers compilations is process-wide too, except that a thread with a `with`
of its own sees that one first, so that threads may compile under different settings. A
compilation takes `now` when it begins and hands that down: no setting changes half-way.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

from terrazzo.base import log
from terrazzo.errors import KnobError

DUMP_LEVELS = ("graph", "canonical", "expr", "schedule", "loop", "llvm", "asm")

_BOOLEANS = {
    "1": True, "true": True, "yes": True, "on": True,
    "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip


def _default_cache_dir() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "terrazzo")


def _knob(
    default: Any,
    meaning: str,
    *,
    choices: tuple[Any, ...] | None = None,
    several: bool = False,
    minimum: int | None = None,
    shapes_code: bool = False,
    steers_runs: bool = False,
    default_text: str | None = None,
) -> Any:
    """Declare one setting: a dataclass field whose metadata is its documentation and its check.

    `several` allows a comma list of choices. `shapes_code` says that compiled code depends on it,
    `steers_runs` that it is read at every run, and never when compiling.
    """
    metadata = {
        "meaning": meaning,
        "choices": choices,
        "several": several,
        "minimum": minimum,
        "shapes_code": shapes_code,
        "steers_runs": steers_runs,
        "default_text": default_text,
    }
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


class KnobRow(NamedTuple):
    """One line of the table of settings."""

    name: str
    value: Any
    default: str  # as text, so that it reads the same on every machine
    variable: str
    allowed: str
    meaning: str


@dataclass(frozen=True, repr=False)
class Settings:
    """The table of settings: name, type, default, meaning and what is allowed."""

    threads: int = _knob(
        0, "worker threads; 0 means every core the process may use", minimum=0, steers_runs=True
    )
    vector_bits: int = _knob(
        0,
        "width of vector registers to generate code for; 0 means the host's best",
        choices=(0, 128, 256, 512),
        shapes_code=True,
    )
    chip: str = _knob(
        "", "chip that code is compiled for; empty: the one where the data is", shapes_code=True
    )
    chip_files: str = _knob(
        "", "folders and files with descriptions of virtual chips, joined as in PATH"
    )
    torch_device: str = _knob(
        "auto", "described chip that PyTorch has as its device, or its file; off: none; auto: gcu, "
        "unless there is another accelerator",
    )
    gcu_fallback: str = _knob(
        "cpu", "what operators do that have no code for that device", choices=("cpu", "error"),
    )
    cuda_simulate: bool = _knob(
        False, "run the kernels of the chip cuda on this machine's CPU, by terrazzo's Triton",
        shapes_code=True,
    )
    fp8_fast_sums: bool = _knob(
        False, "sum up products of 8-bit floats as a GPU's tensor cores do, faster and to 14 bits",
        shapes_code=True,
    )
    cache: bool = _knob(True, "keep compiled code on disk between runs")
    cache_dir: str = _knob(
        _default_cache_dir,
        "folder of the compile cache",
        default_text="$XDG_CACHE_HOME/terrazzo, or ~/.cache/terrazzo",
    )
    cache_limit_mb: int = _knob(
        8192, "size the compile cache is trimmed to, oldest entries first", minimum=1
    )
    tune: bool = _knob(
        False, "measure how each kernel of fixed sizes runs best when it is compiled (chip cuda)",
    )
    tune_db: str = _knob(
        "", "file of what was measured; empty: choices.json in the folder of the compile cache",
    )
    spin: int = _knob(
        20000, "turns an idle pool thread spins for new work before it sleeps", minimum=0,
        steers_runs=True,
    )
    wait_limit: float = _knob(
        60.0, "seconds that a program of a Triton kernel may wait for others; 0: no limit",
        minimum=0, steers_runs=True,
    )
    catch_faults: bool = _knob(
        True, "turn bad pointers of Triton kernels into errors, where the system allows it",
    )
    launch_blocking: bool = _knob(
        False, "wait for each Triton kernel on a virtual chip, so that a bad pointer has its line",
        steers_runs=True,
    )
    dump: str = _knob(
        "",
        "levels printed at each compile, as a comma list",
        choices=DUMP_LEVELS,
        several=True,
    )
    check: bool = _knob(
        False, "on each new compile, run every level against the one above and compare"
    )
    dynamic: str = _knob(
        "auto",
        "when sizes become symbolic: once a second size is seen, never, or from the first call",
        choices=("auto", "never", "always"),
        shapes_code=True,
    )
    profile: bool = _knob(False, "time every kernel as it runs", steers_runs=True)
    sanitize: bool = _knob(
        False, "check what Triton kernels do to memory as they run", shapes_code=True
    )
    opt_level: str = _knob(
        "all",
        "which graph rewrites run",
        choices=("none", "basic", "extended", "layout", "all"),
        shapes_code=True,
    )

    @cached_property
    def code_key(self) -> tuple[Any, ...]:
        """The settings that compiled code depends on: a part of every cache key."""
        return tuple(getattr(self, k.name) for k in _TABLE if k.metadata["shapes_code"])


def _variable(knob: Field[Any]) -> str:
    return f"TZ_{knob.name.upper()}"


def _default(knob: Field[Any]) -> Any:
    return knob.default_factory() if knob.default_factory is not MISSING else knob.default


def _allowed(knob: Field[Any]) -> str:
    """Say in words which values a setting takes."""
    if knob.type == "bool":
        return "0 or 1"
    if knob.metadata["choices"]:
        words = ", ".join(str(choice) for choice in knob.metadata["choices"])
        return f"any of {words}" if knob.metadata["several"] else f"one of {words}"
    if knob.type == "int":
        return f"a whole number, at least {knob.metadata['minimum']}"
    if knob.type == "float":
        return f"a number, at least {knob.metadata['minimum']}"
    return "text"


def _to_text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _from_text(knob: Field[Any], text: str) -> Any:
    """Read a setting from the text of its environment variable."""
    value: Any = text.strip()
    try:
        if knob.type == "bool":
            value = _BOOLEANS[value.lower()]
        elif knob.type == "int":
            value = int(value)
        elif knob.type == "float":
            value = float(value)
    except (KeyError, ValueError):
        raise _refusal(knob, text, _variable(knob)) from None
    return _checked(knob, value, _variable(knob))


def _checked(knob: Field[Any], value: Any, spelled: str) -> Any:
    """Give a value back if the setting allows it; `spelled` is how the user named the setting."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if knob.type == "float" and type(value) is int:
        value = float(value)
    if type(value).__name__ != knob.type:
        raise _refusal(knob, value, spelled)
    if knob.metadata["several"]:
        words = [word.strip() for word in value.split(",") if word.strip()]
        if not set(words) <= set(knob.metadata["choices"]):
            raise _refusal(knob, value, spelled)
        return ",".join(words)
    if knob.metadata["choices"] and value not in knob.metadata["choices"]:
        raise _refusal(knob, value, spelled)
    if knob.metadata["minimum"] is not None and not value >= knob.metadata["minimum"]:  # nor nan
        raise _refusal(knob, value, spelled)
    return value


def _refusal(knob: Field[Any], value: Any, spelled: str) -> KnobError:
    variable = _variable(knob)
    also = "" if spelled == variable else f" (environment variable {variable})"
    return KnobError(
        f"setting {spelled}{also} cannot be {value!r}: {knob.metadata['meaning']}",
        hint=_allowed(knob),
    )


def _knob_named(name: str) -> Field[Any]:
    for knob in _TABLE:
        if knob.name == name:
            return knob
    raise KnobError(
        f"there is no setting called {name!r}",
        hint="one of " + ", ".join(knob.name for knob in _TABLE),
    )


_TABLE: tuple[Field[Any], ...] = fields(Settings)
_OTHER_VARIABLES = ("TZ_DEBUG",)  # of the command line alone
_READ_AT_RUNS = frozenset(knob.name for knob in _TABLE if knob.metadata["steers_runs"])


def _values(settings: Settings) -> dict[str, Any]:
    return {knob.name: getattr(settings, knob.name) for knob in _TABLE}


def _settings(values: Mapping[str, Any]) -> Settings:
    return Settings(**values)


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables that look like settings and are none: misspelt ones would silently do nothing."""
    known = {*_OTHER_VARIABLES, *map(_variable, _TABLE)}
    return [name for name in environment if name.startswith("TZ_") and name not in known]


def _warn_of_unknown(environment: Mapping[str, str]) -> None:
    known = [_variable(knob) for knob in _TABLE]
    for name in unknown_variables(environment):
        import difflib  # nobody without a mistake waits for it

        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
        log.warning("there is no setting %s; the nearest is %s (see `tz knobs`)", name, nearest)


class _Own:
    """The overrides of one thread (or task) that are open, and what they make of the settings."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self._made: tuple[Settings, Settings] | None = None

    def over(self, base: Settings) -> Settings:
        """The settings as this thread sees them, made once for each state of the others."""
        made = self._made
        if made is None or made[0] is not base:
            made = self._made = base, _settings({**_values(base), **self.values})
        return made[1]


class Knobs(Settings):
    """The settings in force, as attributes."""

    _lock: threading.RLock
    _settled: dict[str, Any]  # the values outside every `with`
    _overrides: list[dict[str, Any]]  # of the `with`s now open, oldest first
    _base: Settings  # what threads without a `with` of their own see
    undisturbed: Settings | None  # `now` of every thread while no `with` is open: a plain attribute
    _own: ContextVar[_Own | None]

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        given = os.environ if environment is None else environment
        settled = {
            knob.name: _from_text(knob, given[_variable(knob)])
            if given.get(_variable(knob), "").strip()
            else _default(knob)
            for knob in _TABLE
        }
        _warn_of_unknown(given)
        self.__dict__.update(_lock=threading.RLock(), _settled=settled, _overrides=[],
                             _own=ContextVar("own", default=None))
        self._publish()

    @property
    def now(self) -> Settings:
        """All settings as this thread sees them at this moment.

        The same object for as long as nothing changes, so one comparison notices any change.
        """
        own = self._own.get()
        return self._base if own is None else own.over(self._base)

    @property
    def code_key(self) -> tuple[Any, ...]:
        """The settings that compiled code depends on."""
        return self.now.code_key

    def renew(self) -> None:
        """Make `now` another object: what was compiled so far would be compiled differently."""
        with self._lock:
            self._publish()

    def _publish(self) -> None:
        """Make the settings in force known; those read at every run as plain attributes."""
        values = dict(self._settled)
        for override in self._overrides:
            values.update(override)
        base = _settings(values)
        self.__dict__.update({k: values[k] for k in _READ_AT_RUNS}, _base=base,
                             undisturbed=None if self._overrides else base)

    def __setattr__(self, name: str, value: Any) -> None:
        """Change a setting for good; an open `override` of it stays in force until it ends."""
        checked = _checked(_knob_named(name), value, name)
        with self._lock:
            self._settled[name] = checked
            self._publish()

    @contextmanager
    def override(self, **values: Any) -> Iterator[Knobs]:
        """Change settings for the length of a `with`.

        Overrides may nest and, from several threads, overlap in any order. A thread compiles
        under its own latest one; all else goes by the latest of any thread that is still open,
        and when all have ended the settled values are back.
        """
        checked = {name: _checked(_knob_named(name), value, name) for name, value in values.items()}
        before = self._own.get()
        mine = {k: v for k, v in checked.items() if k not in _READ_AT_RUNS}
        with self._lock:
            self._overrides.append(checked)
            self._publish()
        self._own.set(_Own({**(before.values if before else {}), **mine}))
        try:
            yield self
        finally:
            self._own.set(before)
            with self._lock:
                # By identity: an equal override of another thread is not ours to end.
                self._overrides[:] = [entry for entry in self._overrides if entry is not checked]
                self._publish()

    def describe(self) -> tuple[KnobRow, ...]:
        """List every setting with its value, default, variable and meaning."""
        return tuple(
            KnobRow(
                name=knob.name,
                value=getattr(self, knob.name),
                default=knob.metadata["default_text"] or _to_text(_default(knob)),
                variable=_variable(knob),
                allowed=_allowed(knob),
                meaning=knob.metadata["meaning"],
            )
            for knob in _TABLE
        )

    def _repr_html_(self) -> str:
        from terrazzo.base.tables import Table

        rows = tuple((row.name, str(row.value), row.variable, row.allowed, row.meaning)
                     for row in self.describe())
        return Table("settings", ("name", "value", "variable", "allowed", "meaning"), rows,
                     left=5).html()

    def __repr__(self) -> str:
        values = (f"{knob.name}={getattr(self, knob.name)!r}" for knob in _TABLE)
        return f"Knobs({', '.join(values)})"


def _property_of(name: str) -> property:
    return property(lambda self: getattr(self.now, name))


for _name in (knob.name for knob in _TABLE if knob.name not in _READ_AT_RUNS):
    setattr(Knobs, _name, _property_of(_name))


def _from_environment() -> Knobs:
    """The settings; the command `tz` ends with a message where the environment has a wrong one.

    It cannot catch that itself: this runs while its own module is looked for.
    """
    try:
        return Knobs()
    except KnobError as error:
        if os.path.basename(sys.argv[0]) == "tz" or sys.orig_argv[1:3] == ["-m", "terrazzo"]:
            sys.exit(f"KnobError: {error}")
        raise


knobs = _from_environment()


def thread_count() -> int:
    """How many threads to run on: the setting, or every core the process may use."""
    if knobs.threads:
        return knobs.threads
    if hasattr(os, "sched_getaffinity"):  # respects taskset and cpusets; Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def described_chip() -> str:
    """The described chip of this process: the one that torch is to have as its device, else gcu."""
    asked = knobs.torch_device
    return "gcu" if asked in ("auto", "off") else os.path.splitext(os.path.basename(asked))[0]
