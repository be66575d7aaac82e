"""Defines the base class of the builder's op methods."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from gradrule._builder.handles import TensorHandle
from gradrule._builder.op_names import op_type_of, suggest_method


class OpMethods(ABC):
    """Offers every op type as a method named in snake case; subclasses define the ops that take other arguments."""

    @abstractmethod
    def op(self, op_type: str, *inputs: Any, name: str | None = None, **attrs: Any) -> Any:
        """Adds a node of any op type."""

    @abstractmethod
    def op_output(self, op_type: str, *inputs: Any, name: str | None = None, **attrs: Any) -> TensorHandle:
        """Adds a node of an op type with one output."""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        op_type = None if method.startswith("_") else op_type_of(method)
        if op_type is None:
            own = [name for name in dir(type(self)) if not name.startswith("_")]
            hint = "" if method.startswith("_") else suggest_method(method, own)
            raise AttributeError(f"a graph has no method {method!r}, and no op has that name.{hint}")
        return functools.partial(self.op, op_type)
