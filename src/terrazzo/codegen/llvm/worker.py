"""Object code from a process of its own.

LLVM takes a hundred megabytes and does not give them back. A program that compiles a model once
and then serves it is better off if another process does it: its own memory stays small.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from terrazzo.chips.spec import ChipSpec
from terrazzo.errors import CodegenError
from terrazzo.knobs import unknown_variables

_log = logging.getLogger("terrazzo")
_current: ContextVar[Worker | None] = ContextVar("worker", default=None)


class Worker:
    """A process that compiles what it is sent."""

    def __init__(self) -> None:
        package = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        unknown = unknown_variables(os.environ)  # this process has warned of them already
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**{k: v for k, v in os.environ.items() if k not in unknown}, "PYTHONPATH": path})

    def compile(self, ir_text: str, chip: ChipSpec, opt: str) -> bytes | None:
        """The object code of a module; None where the process is no more."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            pickle.dump((ir_text, chip, opt), self.process.stdin)
            self.process.stdin.flush()
            code, problem = pickle.load(self.process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            _log.debug("the compiling process is gone: %s", error)
            return None
        if problem is not None:
            raise CodegenError(problem)
        return bytes(code)

    def stop(self) -> None:
        """Let the process end."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError as error:
                _log.debug("the compiling process left early: %s", error)
        self.process.wait()


@contextmanager
def elsewhere() -> Iterator[None]:
    """Compile in another process what this thread compiles inside, unless LLVM is here already."""
    if "llvmlite.binding" in sys.modules or not sys.executable:
        yield
        return
    try:
        worker = Worker()
    except OSError as error:
        _log.debug("compiling in this process: %s", error)
        yield
        return
    token = _current.set(worker)
    try:
        yield
    finally:
        _current.reset(token)
        worker.stop()


def compiled_elsewhere(ir_text: str, chip: ChipSpec, opt: str) -> bytes | None:
    """Object code by this thread's worker, if it has one."""
    worker = _current.get()
    return None if worker is None else worker.compile(ir_text, chip, opt)


def _serve() -> None:
    from terrazzo.codegen.llvm import jit

    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anybody prints must not mix with the answers
    while True:
        try:
            request: Any = pickle.load(requests)
        except EOFError:
            return
        answer: tuple[bytes | None, str | None]
        try:
            answer = jit.compile_object(*request), None
        except CodegenError as error:
            answer = None, error.message
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
