"""The process that compiles for others: reads modules, answers with object code."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from terrazzo.chips.cpu.llvm.compile import object_code, prepare
from terrazzo.errors import CodegenError


def serve() -> None:
    """Compile what comes, until nothing more does."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anybody prints must not mix with the answers
    prepare()
    while True:
        try:
            request: Any = pickle.load(requests)
        except EOFError:
            os._exit(0)  # what LLVM would tidy up, the system does faster
        answer: tuple[bytes | None, str | None]
        try:
            answer = object_code(*request), None
        except CodegenError as error:
            answer = None, error.message
        pickle.dump(answer, answers)
        answers.flush()
