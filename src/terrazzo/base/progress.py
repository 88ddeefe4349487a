"""A bar on the terminal for compilations that take long; nothing where nobody looks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

AFTER = 2.0  # seconds: what takes less shows nothing
_current: ContextVar[_Bar | None] = ContextVar("progress", default=None)


class _Bar:
    """What is being done, and the bar that shows it once that has taken a while."""

    def __init__(self, title: str) -> None:
        self._title, self._doing = title, ""
        self._done, self._total = 0, 0
        self._lock = threading.Lock()
        self._display: Any = None
        self._ended = False
        self._timer = threading.Timer(AFTER, self._show)
        self._timer.daemon = True
        self._timer.start()

    def say(self, doing: str, done: int, total: int) -> None:
        with self._lock:
            self._doing, self._done, self._total = doing, done, total
            self._update()

    def end(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._display is not None:
                self._display.stop()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        with self._lock:
            if not self._ended:
                self._display = Progress(
                    TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
                    console=Console(stderr=True), transient=True)
                self._display.add_task("")
                self._update()
                self._display.start()

    def _update(self) -> None:
        if self._display is not None:
            # Without a total the bar pulses: LLVM does not tell how far it is.
            self._display.update(self._display.task_ids[0], completed=self._done,
                                 description=f"compiling {self._title}: {self._doing}",
                                 total=self._total or None)


@contextmanager
def shown(title: str) -> Iterator[None]:
    """Show what is done inside, if it takes long and standard error is a terminal."""
    if _current.get() is not None or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    bar = _Bar(title)
    token = _current.set(bar)
    try:
        yield
    finally:
        _current.reset(token)
        bar.end()


def doing(what: str, done: int = 0, total: int = 0) -> None:
    """Say what is being done now, and how much of it is done."""
    bar = _current.get()
    if bar is not None:
        bar.say(what, done, total)
