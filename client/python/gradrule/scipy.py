"""Makes programs objectives of `scipy.optimize`.

    import gradrule as gr
    import gradrule.scipy

    program = client.compile(graph, fetches=["loss"], ys=["loss"], xs=["w"])
    objective = gradrule.scipy.value_and_grad(program, x="w", data=data)
    scipy.optimize.minimize(objective, objective.pack(w=start), jac=True, hessp=objective.hessp)

It needs SciPy: `pip install 'gradrule[scipy]'`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from gradrule._bridges.program_function import ProgramFunction
from gradrule._messages.call_arguments import CallParams
from gradrule._rpc.sync_client.programs import Program
from gradrule.errors import FeedDtypeError, FeedShapeError, InvalidDerivativeError, UnknownFeedError

__all__ = ["Objective", "Residuals", "residuals", "value_and_grad"]

Vector: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"


def value_and_grad(
    program: Program,
    x: str | Sequence[str] = "x",
    feeds: Mapping[str, Any] | None = None,
    *,
    params: CallParams | None = None,
    timeout: float | None = None,
    **others: Any,
) -> Objective:
    """Returns a program with one y of one element as an objective for `scipy.optimize.minimize(…, jac=True)`.

    Args:
        program: A program of `client.compile`, whose y is among its fetches.
        x: Input to optimize, or several; each must be among the program's xs and have a real dtype. SciPy's vector
            holds their elements, in the order of the names. Inputs whose shape the program does not tell get it from
            `pack`, or have the shape of the vector if there is only one.
        feeds: Values of the program's other inputs, by name.
        params: Values of the rules' params by label, for every call.
        timeout: Seconds for each request; default: that of `connect`.
        **others: The same as keywords.

    Raises:
        UnknownFeedError: A name is no input of the program.
        MissingFeedError: An input has no value.
        InvalidDerivativeError: The program has several ys, an x is not among its xs or has an integer
            dtype, or a y is not among its fetches.
    """
    objective = Objective(ProgramFunction(program, params, timeout), x, {**(feeds or {}), **others})
    if len(objective._function.ys) != 1:
        raise InvalidDerivativeError(f"an objective has one y, and the program has {', '.join(objective._function.ys)}")
    return objective


def residuals(
    program: Program,
    x: str | Sequence[str] = "x",
    feeds: Mapping[str, Any] | None = None,
    *,
    params: CallParams | None = None,
    timeout: float | None = None,
    **others: Any,
) -> Residuals:
    """Returns a program's ys as residuals for `scipy.optimize.least_squares(r, start, jac=r.jac)`.

    Args:
        program: A program of `client.compile`, whose ys are among its fetches.
        x: As for `value_and_grad`.
        feeds: As for `value_and_grad`.
        params: As for `value_and_grad`.
        timeout: As for `value_and_grad`.
        **others: As for `value_and_grad`.

    Raises:
        GradruleError: As for `value_and_grad`.
    """
    return Residuals(ProgramFunction(program, params, timeout), x, {**(feeds or {}), **others})


class _Vectors:
    """Converts between SciPy's vector and the inputs of a program."""

    def __init__(self, function: ProgramFunction, x: str | Sequence[str], others: dict[str, Any]) -> None:
        self._function = function
        function.require_real()
        self._names = [function.input_name(name) for name in ([x] if isinstance(x, str) else x)]
        if not self._names:
            raise InvalidDerivativeError("x is empty: give the name of the input to optimize, or several")
        twice = [name for name in self._names if self._names.count(name) > 1 or name in others]
        if twice:
            raise UnknownFeedError(f"the input {twice[0]!r} is given twice: as x and as a value, or twice as x")
        bound = function.bind((), {**others, **dict.fromkeys(self._names)})
        self._others = {name: value for name, value in bound.items() if name not in self._names}
        for name in self._names:
            if name not in function.xs:
                raise InvalidDerivativeError(
                    f"{name!r} is not one of the program's xs, {', '.join(function.xs)}: compile it with this x"
                )
            if not function.has_gradient(name):
                raise InvalidDerivativeError(
                    f"{name!r} is {function.inputs[name].dtype}: SciPy's vectors are float64, and an optimizer would "
                    "change numbers that are rounded"
                )
        self._shapes = {name: _static(function.inputs[name].shape) for name in self._names}

    def pack(self, **values: Any) -> Vector:
        """Returns the values of the inputs to optimize as one vector; later vectors have the same shapes.

        Raises:
            UnknownFeedError: The names are not those of the inputs to optimize.
            FeedDtypeError: A value is no array of real numbers.
            FeedShapeError: A value has another shape than its input.
        """
        if set(values) != set(self._names):
            raise UnknownFeedError(f"give values for {', '.join(self._names)}, not for {', '.join(values) or 'none'}")
        arrays = {name: _real(values[name], f"the value of {name!r}") for name in self._names}
        for name, array in arrays.items():
            wanted = self._function.inputs[name].shape
            if wanted is not None and (
                len(wanted) != array.ndim or any(w not in (None, n) for w, n in zip(wanted, array.shape, strict=True))
            ):
                raise FeedShapeError(f"the input {name!r} has shape {wanted}, not {array.shape}")
            self._shapes[name] = array.shape
        return np.concatenate([array.ravel() for array in arrays.values()])

    def unpack(self, x: Any) -> dict[str, Any]:
        """Returns the inputs to optimize, by name, with their shapes and dtypes, of a vector.

        Raises:
            FeedDtypeError: The vector is no array of real numbers.
            FeedShapeError: The vector has another size than the inputs together.
        """
        vector = _real(x, "the vector").ravel()
        shapes = dict(self._shapes)
        unknown = [name for name, shape in shapes.items() if shape is None]
        if unknown:
            rank = self._function.inputs[unknown[0]].shape
            if len(shapes) > 1 or (rank is not None and len(rank) != 1):
                raise FeedShapeError(
                    f"the program does not tell the shape of {unknown[0]!r}: make the start with pack()"
                )
            shapes[unknown[0]] = vector.shape
        sizes = [math.prod(shape) for shape in shapes.values() if shape is not None]
        if vector.size != sum(sizes):
            wanted = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise FeedShapeError(f"the vector has {vector.size} elements, but the inputs have {sum(sizes)}: {wanted}")
        parts = np.split(vector, np.cumsum(sizes)[:-1])
        return {
            name: part.reshape(shape).astype(np.dtype(self._function.inputs[name].dtype))
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def _feeds(self, x: Any) -> dict[str, Any]:
        return {**self._others, **self.unpack(x)}

    def _flat(self, gradients: Sequence[Any]) -> Vector:
        found = dict(zip(self._function.xs, gradients, strict=True))
        return np.concatenate([np.asarray(found[name], np.float64).ravel() for name in self._names])


class Objective(_Vectors):
    """A program's y as an objective, which `value_and_grad` returns."""

    def __call__(self, x: Any) -> tuple[float, Vector]:
        """Returns the value and the gradient, float64, at a vector.

        Raises:
            FeedDtypeError: The vector is no array of real numbers.
            FeedShapeError: The vector does not fit the inputs.
            InvalidDerivativeError: The y has more than one element.
            GradruleError: As in `program.evaluate`.
        """
        (y,), gradients = self._function.value_and_gradients(self._feeds(x))
        if np.size(y) != 1:
            raise InvalidDerivativeError(
                f"{self._function.ys[0]!r} has shape {np.shape(y)}: an objective is one number; residuals() takes more"
            )
        return float(np.reshape(y, ())), self._flat(gradients)

    def hessp(self, x: Any, p: Any) -> Vector:
        """Returns the product of the Hessian at a vector with a vector `p`, float64.

        It is the derivative of the gradient that a call returns, so an override applies in the second
        differentiation only if its order is `all`.
        """
        feeds, vectors = self._feeds(x), self.unpack(p)
        return self._flat(self._function.pull_back_again(feeds, [None], vectors, every_order=False))


class Residuals(_Vectors):
    """A program's ys as residuals, which `residuals` returns."""

    def __call__(self, x: Any) -> Vector:
        """Returns all elements of the ys, float64, at a vector."""
        return np.concatenate([np.asarray(y, np.float64).ravel() for y in self._function.run(self._feeds(x))])

    def jac(self, x: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Returns the Jacobian, float64, of shape (number of residuals, size of the vector)."""
        feeds = self._feeds(x)
        sizes = [np.size(y) for y in self._function.run(feeds)]
        rows = []
        for size, by_x in zip(sizes, self._function.jacobian(feeds), strict=True):
            columns = [
                np.zeros((size, np.size(feeds[name])))
                if by_x[name] is None
                else np.asarray(by_x[name], np.float64).reshape(size, np.size(feeds[name]))
                for name in self._names
            ]
            rows.append(np.concatenate(columns, axis=1))
        return np.concatenate(rows)


def _real(value: Any, what: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    array = np.asarray(value)
    if array.dtype.kind == "c":
        raise FeedDtypeError(
            f"{what} is {array.dtype}, and programs compute with real numbers: jac='cs' needs complex ones; give "
            "jac=residuals.jac or jac='2-point'"
        )
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise FeedDtypeError(f"{what} is no array of real numbers, but {type(value).__name__}")
    return array.astype(np.float64)


def _static(shape: tuple[int | None, ...] | None) -> tuple[int, ...] | None:
    if shape is None or None in shape:
        return None
    return tuple(size for size in shape if size is not None)
