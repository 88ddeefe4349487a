"""Running whole models: compiled parts, what the host does between them, and who runs what."""

from terrazzo.session.compiled import CompiledModel
from terrazzo.session.session import Session

__all__ = ["CompiledModel", "Session"]
