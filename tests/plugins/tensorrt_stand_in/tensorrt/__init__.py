"""TensorRT's module over its real bindings, with stand-ins for what only a network under construction can make.

Sizes are expressions there, of classes without a constructor. Here an expression is a tree that can be evaluated.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy.typing  # noqa: F401, which tensorrt.plugin reads as an attribute of numpy
from tensorrt_bindings import *  # noqa: F403
from tensorrt_bindings import DimensionOperation, __version__  # noqa: F401

OPERATIONS = {
    DimensionOperation.SUM: operator.add,
    DimensionOperation.SUB: operator.sub,
    DimensionOperation.PROD: operator.mul,
    DimensionOperation.FLOOR_DIV: operator.floordiv,
    DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
    DimensionOperation.MAX: max,
    DimensionOperation.MIN: min,
}


class IDimensionExpr:
    """A size: a number, the name of a dynamic axis, or an operation on two sizes."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def is_constant(self) -> bool:
        return isinstance(self.parts[0], int)

    def get_constant_value(self) -> int:
        assert self.is_constant()
        return self.parts[0]

    def value(self, sizes: dict[str, int]) -> int:
        """The size where dynamic axes have these sizes."""
        if len(self.parts) == 1:
            return sizes[self.parts[0]] if isinstance(self.parts[0], str) else self.parts[0]
        operation, *operands = self.parts
        return OPERATIONS[operation](*(operand.value(sizes) for operand in operands))


class ExprBuilder:
    """What makes expressions."""

    def constant(self, value: int) -> IDimensionExpr:
        return IDimensionExpr(value)

    def operation(self, operation: Any, first: IDimensionExpr, second: IDimensionExpr) -> IDimensionExpr:
        return IDimensionExpr(operation, first, second)


class DimsExprs(list):
    """The sizes of one tensor."""

    def __init__(self, sizes: Any) -> None:
        super().__init__([None] * sizes if isinstance(sizes, int) else map(IDimensionExpr, sizes))


class ISymExpr:
    """A scalar for a kernel, or a launch parameter: `type`, `dtype` and `expr`."""


class SymExprs(list):
    """The scalars that a kernel gets."""

    @property
    def nbSymExprs(self) -> int:
        return len(self)

    @nbSymExprs.setter
    def nbSymExprs(self, count: int) -> None:
        self[:] = [None] * count
