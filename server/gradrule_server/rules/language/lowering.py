"""Converts a formula to a graph for an op's element types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gradrule.common.dtypes import dtype_name
from gradrule.v1 import errors_pb2
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server.errors import GradruleError, error
from gradrule_server.rules.language import composite_functions
from gradrule_server.rules.language.functions import (
    BINARY,
    COMPARISONS,
    IGNORE_DY,
    RANDOM,
    REDUCTIONS,
    UNARY,
    Domain,
    Elementwise,
)
from gradrule_server.rules.language.source import not_applicable, with_caret
from gradrule_server.rules.language.syntax_tree import (
    Call,
    Constant,
    Expression,
    Formula,
    ParamUse,
    Variable,
)
from gradrule_server.rules.language.values import (
    GraphBuilder,
    TypeConflictError,
    Value,
    broadcast_sources,
    coerce,
    common_dtype,
    depends_on_variables,
    number,
    truth,
)
from gradrule_server.rules.signature import (
    COMPLEX_TYPES,
    FLOAT_TYPES,
    INTEGER_TYPES,
    REAL_TYPES,
    RuleGraph,
    Signature,
    count_noun,
    not_differentiable_error,
    variable_list,
)


def lower(formula: Formula, signature: Signature) -> RuleGraph:
    """Converts a formula to a graph for an op of these element types.

    Raises:
        GradruleError: RULE_ARITY if its variables or number of gradients do not fit the op; RULE_NOT_APPLICABLE if
            types within the formula conflict; RULE_OUTPUT if the type of a gradient is not that of its input.
    """
    lowering = Lowering(formula.text, signature)
    results: list[str | None] = []
    sources: list[frozenset[str]] = []
    for index, expression in enumerate(_per_input(formula, signature)):
        if expression is None:
            results.append(None)
            sources.append(frozenset())
            continue
        value = lowering.at_input(index if formula.form.kind == "each" else None).value(expression)
        results.append(lowering.result(value, expression, index) + ":0")
        sources.append(value.sources)
    return RuleGraph(lowering.builder.graph, lowering.inputs, tuple(results), tuple(sources), lowering.columns)


def _per_input(formula: Formula, signature: Signature) -> Sequence[Expression | None]:
    """Returns the expression for the gradient of each input; None: no gradient."""
    form, differentiable, number_of_inputs = formula.form, signature.differentiable, len(signature.inputs)
    if form.kind == "tuple":
        if len(form.expressions) != number_of_inputs:
            raise _arity(
                f"the rule gives {count_noun(len(form.expressions), 'gradient')}, but the op has "
                f"{count_noun(number_of_inputs, 'input')}{variable_list('x', number_of_inputs)}: "
                "a tuple has one entry per input"
            )
        for index, expression in enumerate(form.expressions):
            if expression is not None and index not in differentiable:
                raise not_differentiable_error(signature, index)
        return form.expressions
    if not differentiable:
        raise _arity("the op has no input of a floating or complex type, so it cannot have a gradient")
    (single,) = form.expressions
    if form.kind == "each":
        return [single if index in differentiable else None for index in range(number_of_inputs)]
    if form.kind == "single" and len(differentiable) > 1:
        names = [f"x{index}" for index in differentiable[:8]]
        raise _arity(
            f"a single expression serves an op with one differentiable input, and this op has {len(differentiable)} "
            f"({', '.join(names)}{', …' if len(differentiable) > 8 else ''}): write first(…) for the first one alone, "
            f"each(…) for all, or a tuple with one entry for each of the op's {count_noun(number_of_inputs, 'input')}"
        )
    return [single if index == differentiable[0] else None for index in range(number_of_inputs)]


def _arity(message: str) -> GradruleError:
    return error(errors_pb2.ERROR_REASON_RULE_ARITY, message, field="expression")


class Lowering:
    """Converts expressions to nodes of a graph."""

    def __init__(self, text: str, signature: Signature) -> None:
        self.builder = GraphBuilder()
        self.inputs: dict[str, str] = {}
        self.columns: dict[str, int] = {}
        self.x_dtype = signature.x_dtype
        self._text = text
        self._signature = signature
        self._each: int | None = None
        self._draws: dict[tuple[object, ...], int] = {}

    def at_input(self, index: int | None) -> Lowering:
        """Sets the input that names without an index mean, within `each`; its type becomes the type of literals."""
        self._each = index
        if index is not None:
            self.x_dtype = self._signature.inputs[index]
        return self

    def value(self, expression: Expression) -> Value:
        """Adds the nodes of an expression; returns its value."""
        match expression:
            case Constant(value=bool() as flag):
                return truth(flag)
            case Constant(value=literal):
                return number(literal)
            case ParamUse(name=name):
                variable = f"param/{name}"
                self.inputs[variable] = self.builder.placeholder(variable, Dt.DT_DOUBLE)
                return Value(Dt.DT_DOUBLE, variable, weak=True, sources=frozenset({variable}))
            case Variable():
                family, index, dtype = self._resolve(expression)
                name = f"{family}{index}"
                # The op's own gradient has the shape of its input.
                shape_of = f"x{index}" if family == "default" else name
                self.inputs[name] = self.builder.placeholder(name, dtype)
                return Value(dtype, self.builder.variable(self.inputs[name], dtype), sources=frozenset({shape_of}))
            case Call():
                return self._call(expression)

    def result(self, value: Value, expression: Expression, index: int) -> str:
        """Returns the tensor of the gradient of input `index`. Raises RULE_OUTPUT if it has another type."""
        wanted = self._signature.inputs[index]
        if value.weak or value.dtype == wanted:
            return self.builder.result(coerce(value, wanted, self.builder), wanted)
        given = (
            "a truth value: multiply it by dy"
            if value.is_bool
            else f"{dtype_name(value.dtype)}: cast(v, x{index}) converts it"
        )
        raise error(
            errors_pb2.ERROR_REASON_RULE_OUTPUT,
            with_caret(
                self._text,
                expression.offset,
                f"the gradient of input {index} must be {dtype_name(wanted)} as the input is; this is {given}",
            ),
            field="expression",
        )

    def own_type(self, value: Value) -> tuple[str, int]:
        """Returns tensor and type of a value; literals and params are float64."""
        dtype = Dt.DT_DOUBLE if value.weak else value.dtype
        return coerce(value, dtype, self.builder), dtype

    def strong(self, value: Value) -> tuple[str, int]:
        """Returns tensor and type of a value; literals and params get the type of x."""
        dtype = self.x_dtype if value.weak else value.dtype
        return coerce(value, dtype, self.builder), dtype

    def numeric(self, value: Value) -> Value:
        """Returns a truth value as a number of the type of x, and other values unchanged."""
        if not value.is_bool:
            return value
        return Value(self.x_dtype, coerce(value, self.x_dtype, self.builder), sources=value.sources)

    def require(self, dtype: int, domain: Domain, function: str) -> None:
        """Raises `TypeConflictError` for element types that a function does not accept."""
        if dtype in FLOAT_TYPES or (dtype in COMPLEX_TYPES and domain & Domain.COMPLEX):
            return
        if dtype in INTEGER_TYPES and domain & Domain.INT:
            return
        name = dtype_name(dtype)
        if dtype in COMPLEX_TYPES:
            raise TypeConflictError(f"{function!r} is not defined for {name}: abs(v), real(v) and imag(v) are real")
        raise TypeConflictError(f"{function!r} does not take {name}: cast it first, for example cast(v, dy)")

    def _resolve(self, variable: Variable) -> tuple[str, int, int]:
        index = variable.index
        if variable.bare and self._each is not None:
            own = variable.family in ("x", "default") or len(self._signature.inputs) == len(self._signature.outputs)
            index = self._each if own else 0
        return variable.family, index, self._signature.dtype_of(variable.family, index)

    def _call(self, call: Call) -> Value:
        if call.function == "cast" and call.dtype is None:
            return self._locating_errors(
                call, lambda: self._cast(self.value(call.arguments[0]), self._type_like(call.arguments[1]))
            )
        arguments = [self.value(argument) for argument in call.arguments]
        return self._locating_errors(call, lambda: self._apply(call, arguments))

    def _locating_errors(self, call: Call, compute: Callable[[], Value]) -> Value:
        """Calls a function; adds the position of a call in the text to its type conflicts and to its nodes."""
        nodes = self.builder.graph.node
        before = len(nodes)
        try:
            value = compute()
        except TypeConflictError as conflict:
            raise not_applicable(self._text, call.offset, str(conflict)) from None
        for node in nodes[before:]:
            self.columns.setdefault(node.name, call.offset + 1)
        return value

    def _apply(self, call: Call, arguments: list[Value]) -> Value:
        function = call.function
        if function in REDUCTIONS and call.axes is not None:
            return composite_functions.reduce(self, function, call.axes, arguments[0])
        if function in composite_functions.WITH_AXES and call.axes is not None:
            return composite_functions.WITH_AXES[function](self, call.axes, arguments[0])
        if function == "compare":
            return self._compare(call.comparisons, arguments)
        if function == "cast" and call.dtype is not None:
            value = self._cast(arguments[0], call.dtype)
            return replace(value, tensor=self.builder.rounded(value.tensor or "", call.dtype))
        if function in ("and", "or", "not"):
            return self._logic(function, arguments)
        if function == "abs" and arguments[0].dtype in COMPLEX_TYPES:
            return self._of_complex("ComplexAbs", arguments[0])
        if function in composite_functions.EDGE_CASES:
            return composite_functions.EDGE_CASES[function](self, arguments[0])
        if function in UNARY:
            return self.elementwise(UNARY[function], [self.numeric(arguments[0])], function)
        if function in BINARY:
            return self._binary(function, arguments)
        if function in RANDOM:
            return self._draw(RANDOM[function], arguments)
        return _SPECIAL[function](self, arguments)

    def elementwise(self, row: Elementwise, values: Sequence[Value], function: str) -> Value:
        """Adds an elementwise op; if all values are constants, computes the result instead."""
        constants = [value.constant for value in values]
        if row.fold is not None and all(constant is not None for constant in constants):
            # TensorFlow returns inf and nan without a warning, so NumPy must not warn either.
            with np.errstate(all="ignore"):
                folded = row.fold(*(np.float64(constant) for constant in constants if constant is not None))
            return truth(bool(folded)) if row.gives_bool else number(float(folded))
        common = common_dtype(values, self.x_dtype)
        dtype = Dt.DT_DOUBLE if common is None else common
        self.require(dtype, row.domain, function)
        tensors = [coerce(value, dtype, self.builder) for value in values]
        sources = broadcast_sources(values)
        if row.op in ("Equal", "NotEqual"):
            tensor = self.builder.add(row.op, *tensors, T=dtype, incompatible_shape_error=True)
        else:
            tensor = self.builder.add(row.op, *tensors, T=dtype)
        if row.gives_bool:
            return Value(Dt.DT_BOOL, tensor, sources=sources)
        return Value(dtype, tensor, weak=common is None, sources=sources)

    def _binary(self, function: str, values: list[Value]) -> Value:
        if function == "**" and values[1].constant == 2.0 and not isinstance(values[1].constant, bool):
            return self.elementwise(UNARY["square"], [self.numeric(values[0])], function)
        if all(value.is_bool for value in values):
            values = [self.numeric(value) for value in values]
        joined = values[0]
        for value in values[1:]:
            joined = self.elementwise(BINARY[function], [joined, value], function)
        return joined

    def _compare(self, symbols: Sequence[str], values: Sequence[Value]) -> Value:
        compared = []
        for symbol, left, right in zip(symbols, values, values[1:], strict=False):
            if left.is_bool and right.is_bool and symbol in ("==", "!="):
                tensors = [coerce(value, Dt.DT_BOOL, self.builder) for value in (left, right)]
                tensor = self.builder.add(COMPARISONS[symbol].op, *tensors, T=Dt.DT_BOOL, incompatible_shape_error=True)
                compared.append(Value(Dt.DT_BOOL, tensor, sources=broadcast_sources((left, right))))
            else:
                pair = [self.numeric(left), self.numeric(right)] if left.is_bool and right.is_bool else [left, right]
                compared.append(self.elementwise(COMPARISONS[symbol], pair, symbol))
        return self._logic("and", compared) if len(compared) > 1 else compared[0]

    def _logic(self, function: str, values: Sequence[Value]) -> Value:
        for value in values:
            if not value.is_bool:
                raise TypeConflictError(
                    f"{function!r} needs truth values, such as x > 0, and this is {dtype_name(value.dtype)}"
                )
        if function == "not":
            return Value(Dt.DT_BOOL, self.builder.add("LogicalNot", *self._bools(values)), sources=values[0].sources)
        op = "LogicalAnd" if function == "and" else "LogicalOr"
        joined, *rest = self._bools(values)
        for tensor in rest:
            joined = self.builder.add(op, joined, tensor)
        return Value(Dt.DT_BOOL, joined, sources=broadcast_sources(values))

    def _bools(self, values: Sequence[Value]) -> list[str]:
        return [coerce(value, Dt.DT_BOOL, self.builder) for value in values]

    def _where(self, values: list[Value]) -> Value:
        condition, *branches = values
        if not condition.is_bool:
            raise TypeConflictError(
                f"'where' needs a truth value first, such as x > 0, and this is {dtype_name(condition.dtype)}"
            )
        common = common_dtype(branches, self.x_dtype, keep_bool=True)
        dtype = Dt.DT_DOUBLE if common is None else common
        # A choice between two literals gets the type of x here: float64 would not be more precise.
        weak = common is None
        if weak and depends_on_variables(condition):
            dtype, weak = self.x_dtype, False
        tensors = [coerce(branch, dtype, self.builder) for branch in branches]
        tensor = self.builder.add("SelectV2", *self._bools([condition]), *tensors, T=dtype)
        return Value(dtype, tensor, weak=weak, sources=broadcast_sources(values))

    def _clip(self, values: list[Value]) -> Value:
        value, low, high = values
        return self._binary("minimum", [self._binary("maximum", [value, low]), high])

    def _draw(self, op: str, values: Sequence[Value]) -> Value:
        """Adds random numbers; equal calls give the same numbers, so that a formula can use the same noise twice."""
        salt = self.inputs[composite_functions.SALT] = composite_functions.salt(self.builder)
        number = self._draws.setdefault((op, self._each, *values), len(self._draws))
        return composite_functions.draw(self, op, values[0], values[1], salt, number)

    def _cast(self, value: Value, dtype: int) -> Value:
        if value.dtype in COMPLEX_TYPES and dtype not in COMPLEX_TYPES:
            raise TypeConflictError(
                f"a cast from {dtype_name(value.dtype)} would drop the imaginary part: write real(v) or abs(v)"
            )
        if value.constant is not None:
            return Value(dtype, coerce(value, dtype, self.builder))
        return Value(dtype, self.builder.cast(value.tensor or "", value.dtype, dtype), sources=value.sources)

    def _type_like(self, like: Expression) -> int:
        """Returns the type of `like`, without adding nodes if it is a variable."""
        if isinstance(like, Variable):
            return self._resolve(like)[2]
        value = self.value(like)
        return self.x_dtype if value.weak else value.dtype

    def _like(self, op: str, value: Value) -> Value:
        tensor, dtype = self.own_type(self.numeric(value))
        return Value(dtype, self.builder.add(op, tensor, T=dtype), weak=value.weak, sources=value.sources)

    def _stop_gradient(self, value: Value) -> Value:
        if value.tensor is None:
            return value
        tensor = self.builder.add("StopGradient", value.tensor, T=value.dtype)
        return Value(value.dtype, tensor, weak=value.weak, sources=value.sources)

    def _of_complex(self, op: str, value: Value) -> Value:
        real = REAL_TYPES[value.dtype]
        return Value(real, self.builder.add(op, value.tensor or "", T=value.dtype, Tout=real), sources=value.sources)

    def _part(self, op: str, value: Value) -> Value:
        """Adds the real or imaginary part; for a real value, these are the value itself and zeros."""
        value = self.numeric(value)
        if value.dtype in COMPLEX_TYPES:
            return self._of_complex(op, value)
        return value if op == "Real" else self._like("ZerosLike", value)

    def _conj(self, value: Value) -> Value:
        value = self.numeric(value)
        if value.dtype not in COMPLEX_TYPES:
            return value
        return Value(value.dtype, self.builder.add("Conj", value.tensor or "", T=value.dtype), sources=value.sources)


_SPECIAL: Mapping[str, Callable[[Lowering, list[Value]], Value]] = {
    "+v": lambda lowering, values: lowering.numeric(values[0]),
    IGNORE_DY: lambda lowering, values: values[0],
    "where": Lowering._where,
    "clip": Lowering._clip,
    "zeros_like": lambda lowering, values: lowering._like("ZerosLike", values[0]),
    "ones_like": lambda lowering, values: lowering._like("OnesLike", values[0]),
    "stop_gradient": lambda lowering, values: lowering._stop_gradient(values[0]),
    "conj": lambda lowering, values: lowering._conj(values[0]),
    "real": lambda lowering, values: lowering._part("Real", values[0]),
    "imag": lambda lowering, values: lowering._part("Imag", values[0]),
    "sum_to": lambda lowering, values: composite_functions.sum_to(lowering, *values),
}
