"""Object code from a process of its own.

LLVM takes a hundred megabytes and does not give them back. A program that compiles a model once
and then serves it is better off if another process does it: its own memory stays small. That
process loads the few of our modules that it needs, and LLVM while nobody waits for it yet.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.base import log
from terrazzo.chips.cpu.llvm.compile import Target
from terrazzo.errors import CodegenError
from terrazzo.knobs import unknown_variables

if TYPE_CHECKING:
    from subprocess import Popen

_current: ContextVar[Worker | None] = ContextVar("worker", default=None)

# The package without what `import terrazzo` brings: settings, which take milliseconds.
_PROGRAM = """
import sys, types
for name in ("terrazzo", "terrazzo.chips", "terrazzo.chips.cpu"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [sys.argv[1] + name.removeprefix("terrazzo").replace(".", "/")]
from terrazzo.chips.cpu.llvm.server import serve
serve()
"""


class Worker:
    """A process that compiles what it is sent."""

    @cached_property
    def process(self) -> Popen[bytes]:
        import subprocess  # those who compile in their own process do without

        unknown = unknown_variables(os.environ)  # this process has warned of them already
        environment = {k: v for k, v in os.environ.items() if k not in unknown}
        # Without `site`: what it would find is on our own path already.
        return subprocess.Popen(
            [sys.executable, "-S", "-c", _PROGRAM, str(Path(__file__).parents[3])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)})

    def compile(self, ir_text: str, target: Target, opt: str) -> bytes | None:
        """The object code of a module; None where the process is no more."""
        try:
            assert self.process.stdin is not None and self.process.stdout is not None
            pickle.dump((ir_text, target, opt), self.process.stdin)
            self.process.stdin.flush()
            code, problem = pickle.load(self.process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            log.debug("the compiling process is gone: %s", error)
            return None
        if problem is not None:
            raise CodegenError(problem)
        return bytes(code)

    def stop(self) -> None:
        """End the process: it owes nobody an answer, and may still be busy importing."""
        if "process" not in vars(self):
            return
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError as error:
                log.debug("the compiling process left early: %s", error)
        self.process.wait()


@contextmanager
def elsewhere(*, likely: bool = True) -> Iterator[None]:
    """Compile in another process what this thread compiles inside, unless LLVM is here already.

    Where it is not likely that there is something to compile, the process starts when there is.
    """
    if "llvmlite.binding" in sys.modules or not sys.executable or _current.get() is not None:
        yield
        return
    worker = Worker()
    try:
        if likely:
            _ = worker.process  # which starts it
    except OSError as error:
        log.debug("compiling in this process: %s", error)
        yield
        return
    token = _current.set(worker)
    try:
        yield
    finally:
        _current.reset(token)
        worker.stop()


def compiled_elsewhere(ir_text: str, target: Target, opt: str) -> bytes | None:
    """Object code by this thread's worker, if it has one."""
    worker = _current.get()
    return None if worker is None else worker.compile(ir_text, target, opt)
