"""The converters, one family a file. Importing this room registers them all."""

from terrazzo.frontends.onnx.convert import elementwise

__all__ = ["elementwise"]
