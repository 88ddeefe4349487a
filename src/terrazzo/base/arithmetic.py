"""Python's operators for what stands for a value of one element."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

Made = TypeVar("Made")


class Arithmetic(Generic[Made]):
    """Operators that are operations of the table of scalar operations.

    Comparisons too give a value of each element; equality is left to each class, as the compiler
    needs identity.
    """

    __slots__ = ()

    def apply(self, op: str, *args: Any) -> Made:
        """The operation of a name on whatever its operands are."""
        raise NotImplementedError

    def __add__(self, other: Any) -> Made:
        return self.apply("add", self, other)

    def __radd__(self, other: Any) -> Made:
        return self.apply("add", other, self)

    def __sub__(self, other: Any) -> Made:
        return self.apply("sub", self, other)

    def __rsub__(self, other: Any) -> Made:
        return self.apply("sub", other, self)

    def __mul__(self, other: Any) -> Made:
        return self.apply("mul", self, other)

    def __rmul__(self, other: Any) -> Made:
        return self.apply("mul", other, self)

    def __truediv__(self, other: Any) -> Made:
        return self.apply("div", self, other)

    def __rtruediv__(self, other: Any) -> Made:
        return self.apply("div", other, self)

    def __floordiv__(self, other: Any) -> Made:
        return self.apply("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Made:
        return self.apply("floordiv", other, self)

    def __mod__(self, other: Any) -> Made:
        return self.apply("mod", self, other)

    def __rmod__(self, other: Any) -> Made:
        return self.apply("mod", other, self)

    def __pow__(self, other: Any) -> Made:
        return self.apply("pow", self, other)

    def __rpow__(self, other: Any) -> Made:
        return self.apply("pow", other, self)

    def __neg__(self) -> Made:
        return self.apply("neg", self)

    def __abs__(self) -> Made:
        return self.apply("abs", self)

    def __lt__(self, other: Any) -> Made:
        return self.apply("lt", self, other)

    def __le__(self, other: Any) -> Made:
        return self.apply("le", self, other)

    def __gt__(self, other: Any) -> Made:
        return self.apply("gt", self, other)

    def __ge__(self, other: Any) -> Made:
        return self.apply("ge", self, other)

    def __and__(self, other: Any) -> Made:
        return self.apply("and", self, other)

    def __rand__(self, other: Any) -> Made:
        return self.apply("and", other, self)

    def __or__(self, other: Any) -> Made:
        return self.apply("or", self, other)

    def __ror__(self, other: Any) -> Made:
        return self.apply("or", other, self)

    def __xor__(self, other: Any) -> Made:
        return self.apply("xor", self, other)

    def __rxor__(self, other: Any) -> Made:
        return self.apply("xor", other, self)

    def __invert__(self) -> Made:
        return self.apply("not", self)
