"""What each operator means, one family a file. Importing this room registers them all."""

from terrazzo.ops import creation, elementwise
from terrazzo.ops.methods import install

install()

__all__ = ["creation", "elementwise"]
