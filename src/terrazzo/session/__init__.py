"""Running whole models: compiled parts, what the host does between them, and who runs what."""

from terrazzo.session.session import Session

__all__ = ["Session"]
