"""What users make of functions, files and models: operators and executables."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from terrazzo.errors import CompileError
from terrazzo.ops.define import operator

if TYPE_CHECKING:
    from terrazzo.runtime.executable import Executable


def op(function: Callable[..., Any] | None = None, *, name: str | None = None,
       grad: Callable[..., Any] | None = None, domain: str = "") -> Any:
    """Make a function of tensors an operator: compiled, differentiable, like the built-in ones.

    Parameters before `*` are tensors, those after it are attributes, which are a part of the
    program. As a decorator it is `@tz.op` or `@tz.op(name=..., grad=...)`.

    name    what graphs and messages call it; that of the function by default
    grad    its own gradient rule, `rule(node, *cotangents)`, which answers with a list of one
            gradient for each tensor: docs/language.md
    domain  ONNX models may use it too, as a node of this domain with the operator's name

    >>> import numpy as np, terrazzo as tz
    >>> @tz.op
    ... def scaled(x, weight, *, power=2):
    ...     "x times a power of weight"
    ...     return x * weight ** power
    >>> scaled(np.array([1.0, 2.0]), 3.0, power=1)
    array([3., 6.])
    """
    if function is None:
        return functools.partial(op, name=name, grad=grad, domain=domain)
    made = operator(function, family="user", name=name, grad=grad)
    if domain:
        from terrazzo.frontends.onnx.registry import converts_operator

        converts_operator(made, domain)
    return made


def unpickled_op(function: Callable[..., Any], name: str, grad: Callable[..., Any] | None) -> Any:
    """An operator as a pickle tells of it."""
    return op(function, name=name, grad=grad)


def load(path: str | os.PathLike[str]) -> Executable:
    """An executable from the file that `Executable.save` wrote.

    >>> import numpy as np, terrazzo as tz
    >>> x = np.array([-1.0, 2.0])
    >>> tz.relu.compile(x).save("relu.tzx")
    >>> tz.load("relu.tzx")(x)
    array([0., 2.])
    """
    from terrazzo.runtime.executable import Executable

    return Executable.load(path)


def compile(model: Any) -> Executable:
    """An ONNX model (a path, bytes or a ModelProto) as one executable, which can be saved.

    What has to run in parts is refused; `terrazzo.ort.InferenceSession` runs every model.

        tz.compile("model.onnx").save("model.tzx")
        tz.load("model.tzx")(x)
    """
    from terrazzo.frontends.onnx.session import Session

    session = Session(model, reference=False)
    if session.whole is None:
        from terrazzo.frontends.onnx.session.report import COMPILED, placement

        left = next((p for p in placement(session) if p.where != COMPILED), None)
        raise CompileError("the model is not one executable: " + (
            f"{left.node} runs {left.where}: {left.why}" if left is not None else
            "its inputs are not tensors of known rank"),
            hint="run it in a session (terrazzo.ort), which compiles the rest")
    return session.whole.executable
