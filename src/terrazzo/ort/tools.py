"""onnxruntime's tools in Python (quantising, fusing), where it is installed beside us."""

from __future__ import annotations

import os
import sys


def folders(part: str = "") -> list[str]:
    """The folders of onnxruntime's package, or of a part of it, on the path of modules."""
    found = (os.path.join(entry or os.curdir, "onnxruntime", part) for entry in sys.path)
    return [folder for folder in found if os.path.isfile(os.path.join(folder, "__init__.py"))][:1]
