"""Parses and checks expressions: converts Python's syntax tree to that of the language, and refuses everything else."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gradrule.v1 import errors_pb2
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server.errors import GradruleError, did_you_mean, error
from gradrule_server.rules.language.functions import (
    CONSTANTS,
    FUNCTIONS,
    IGNORE_DY,
    LOGIC,
    RANDOM,
    SPELLINGS,
    UNARY,
    Function,
)
from gradrule_server.rules.language.source import (
    ALLOWED,
    MAX_DEPTH,
    Source,
    invalid_expression,
    quoted,
    read,
    with_caret,
)
from gradrule_server.rules.language.syntax_tree import (
    EVERYTHING,
    FAMILIES,
    Axes,
    Call,
    Constant,
    Expression,
    Form,
    Formula,
    ParamUse,
    Variable,
    declared_params_text,
    depends_on_dy,
    is_zero,
    param_name_problem,
    split_variable,
    walk,
)
from gradrule_server.rules.signature import TYPES_BY_NAME

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
}
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
_LAST_AXIS = Axes("list", (-1,))
_AXES = 'an axis is None, an integer, a tuple of integers, "sample" or "channel"'


def parse(expression: str, params: Sequence[str] = (), *, stored: bool = False) -> Formula:
    """Parses and checks an expression over the variables and `params`.

    Args:
        expression: The text.
        params: The names of the declared params.
        stored: Whether the expression was accepted before, maybe by a version that refused less.

    Raises:
        GradruleError: INVALID_EXPRESSION for a syntax error, or a number in place of a truth value; INVALID_RULE for an
            expression that is only a constant, or has a gradient that drops the upstream gradient without saying so.
    """
    source = read(expression, stored=stored)
    text = source.text
    formula = Formula(text, _Reader(source, params).form(source.body), tuple(params))
    for part in formula._parts:
        if isinstance(part, Call):
            _check_truth_values(text, part)
            _check_seed(text, part)
    if not formula.variables:
        raise error(
            errors_pb2.ERROR_REASON_INVALID_RULE,
            f"the rule {text.strip()[:80]!r} is only a constant: it names none of x, y, dy, default. "
            "A gradient of zeros is zeros_like(x), one of ones is ones_like(x)",
            field="expression",
        )
    for gradient in formula.form.given:
        _check_dy(text, gradient, stored=stored)
    return formula


def _check_dy(text: str, gradient: Expression, *, stored: bool) -> None:
    """Refuses a gradient that drops the upstream gradient, unless it is zero or says `ignore_dy`."""
    uses_dy = depends_on_dy(gradient)
    if isinstance(gradient, Call) and gradient.function == IGNORE_DY:
        if uses_dy:
            raise invalid_expression(
                text, gradient.offset, f"{IGNORE_DY}(…) is for a formula without dy and default, and this one uses them"
            )
    elif not (uses_dy or is_zero(gradient) or stored):
        problem = (
            "this gradient depends on neither dy nor default, so nothing of the upstream gradient gets through: "
            f"multiply by dy, dy * (…), or write {IGNORE_DY}(…) if that is meant"
        )
        message = with_caret(text, gradient.offset, problem)
        raise error(errors_pb2.ERROR_REASON_INVALID_RULE, message, field="expression")


def _check_truth_values(text: str, call: Call) -> None:
    """Refuses numbers in place of truth values, where they can be recognised without an op."""
    if call.function in LOGIC or call.function in ("any", "all"):
        wanted = call.arguments
    elif call.function == "where":
        wanted = call.arguments[:1]
    else:
        return
    for argument in wanted:
        if _is_number(argument):
            raise invalid_expression(
                text,
                argument.offset,
                f"{call.function!r} needs a truth value, such as x > 0, and this is a number; v != 0 is a truth value",
            )


def _check_seed(text: str, call: Call) -> None:
    """Refuses a seed that depends on variables, because a seed must be one number that the caller knows."""
    if call.function not in RANDOM:
        return
    seed = call.arguments[1]
    if not _is_number(seed) or any(isinstance(part, Variable) for part in walk(seed)):
        problem = "must be a number or a param, because it must be known without the op"
    elif isinstance(seed, Constant) and not float(seed.value).is_integer():
        problem = "must be a whole number"
    else:
        return
    raise invalid_expression(text, seed.offset, f"the seed of {call.function!r} {problem}")


def _is_number(expression: Expression) -> bool:
    """Returns whether an expression is a number for every op; x and y may be bool."""
    match expression:
        case Constant(value=value):
            return not isinstance(value, bool)
        case ParamUse():
            return True
        case Variable(family=family):
            return family in ("dy", "default")
        case Call(function="where", arguments=(_, first, second)):
            return _is_number(first) or _is_number(second)
        case Call(function="zeros_like" | "ones_like" | "stop_gradient", arguments=(argument,)):
            return _is_number(argument)
        case Call(function="cast", arguments=(_, like)):
            return _is_number(like)
        case Call(function="cast", dtype=dtype):
            return dtype != Dt.DT_BOOL
        case Call(function=function):
            gives_bool = function in LOGIC or function in ("compare", "any", "all")
            return not gives_bool and not (function in UNARY and UNARY[function].gives_bool)


class _Reader:
    def __init__(self, source: Source, params: Sequence[str]) -> None:
        self._source = source
        self._params = params

    def form(self, body: ast.expr) -> Form:
        if isinstance(body, ast.Tuple):
            if not body.elts:
                raise self._error(
                    body, "an empty tuple has no gradient: write one entry per input, an expression or None"
                )
            entries = (None if _is_none(entry) else self._gradient(entry, 1) for entry in body.elts)
            return Form("tuple", tuple(entries))
        if isinstance(body, ast.Call) and isinstance(body.func, ast.Name) and body.func.id in ("each", "first"):
            _, (argument,) = self._signature(body, FUNCTIONS[body.func.id])
            return Form("each" if body.func.id == "each" else "first", (self._gradient(argument, 1),))
        if _is_none(body):
            raise self._error(body, "None is not a gradient: write zeros_like(x) for a gradient of zeros")
        return Form("single", (self._gradient(body, 0),))

    def _gradient(self, node: ast.expr, depth: int) -> Expression:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == IGNORE_DY:
            _, (argument,) = self._signature(node, FUNCTIONS[IGNORE_DY])
            return Call(IGNORE_DY, (self._read(argument, depth + 1),), self._source.start(node))
        return self._read(node, depth)

    def _read(self, node: ast.expr, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise self._error(node, f"the expression is nested more than {MAX_DEPTH} deep")
        match node:
            case ast.Constant():
                return self._constant(node)
            case ast.Name():
                return self._name(node)
            case ast.Call():
                return self._call(node, depth)
            case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() as op, right=right):
                return self._bitwise(left, "&" if isinstance(op, ast.BitAnd) else "|", right, depth)
            case ast.BinOp(left=left, op=op, right=right):
                symbol = _BINARY.get(type(op))
                if symbol is None:
                    raise self._error(node, f"there is no such operator in the language: {ALLOWED}")
                offset = self._between(left, symbol)
                return Call(symbol, (self._read(left, depth + 1), self._read(right, depth + 1)), offset)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return Call("-v", (self._read(operand, depth + 1),), self._source.start(node))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return Call("+v", (self._read(operand, depth + 1),), self._source.start(node))
            case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
                return Call("not", (self._read(operand, depth + 1),), self._source.start(node))
            case ast.BoolOp(op=op, values=values):
                word = "and" if isinstance(op, ast.And) else "or"
                parts = tuple(self._read(value, depth + 1) for value in values)
                return Call(word, parts, self._between(values[0], word))
            case ast.Compare():
                return self._compare(node, depth)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                parts = tuple(self._read(part, depth + 1) for part in (test, body, orelse))
                return Call("where", parts, self._between(body, "if"))
            case ast.Tuple():
                raise self._error(node, "a tuple is allowed only around the whole expression, with one entry per input")
            case ast.Attribute():
                raise self._error(node, f"there are no attributes in the language: {ALLOWED}")
            case _:
                raise self._error(node, f"this is not in the language: {ALLOWED}")

    def _bitwise(self, left: ast.expr, symbol: str, right: ast.expr, depth: int) -> Call:
        """Reads `&` or `|` of truth values; both mean the same as `and` and `or`."""
        parts = (self._read(left, depth + 1), self._read(right, depth + 1))
        offset = self._between(left, symbol)
        if any(_is_number(part) for part in parts):
            raise invalid_expression(
                self._source.text,
                offset,
                f"{symbol} joins truth values, and binds more tightly than comparisons: write "
                f"(x > 0) {symbol} (dy > 0), or use `and`, `or`",
            )
        return Call("and" if symbol == "&" else "or", parts, offset)

    def _constant(self, node: ast.Constant) -> Constant:
        value = node.value
        offset = self._source.start(node)
        if isinstance(value, bool):
            return Constant(value, offset)
        if isinstance(value, (int, float)):
            try:
                number = float(value)
            except OverflowError:
                number = float("inf")
            if number in (float("inf"), float("-inf")):
                raise self._error(node, "this number is too large for float64; `inf` is infinity")
            return Constant(number, offset)
        if isinstance(value, complex):
            raise self._error(
                node,
                "there are no imaginary numbers in the language; use real(v), imag(v) and conj(v) for complex values",
            )
        if isinstance(value, str):
            raise self._error(
                node,
                'a string is allowed only as axis="sample", as axis="channel" or as the type in cast(v, "float32")',
            )
        if value is None:
            raise self._error(
                node, "None is allowed only as an entry of the tuple or as axis=None; zeros_like(x) is zero"
            )
        raise self._error(node, f"this is not in the language: {ALLOWED}")

    def _name(self, node: ast.Name) -> Expression:
        name, offset = node.id, self._source.start(node)
        if name in self._params:
            return ParamUse(name, offset)
        variable = split_variable(name)
        if variable is not None:
            return Variable(*variable, offset)
        if name in CONSTANTS:
            return Constant(CONSTANTS[name], offset)
        if name in FUNCTIONS:
            raise self._error(node, f"{name!r} is a function and needs arguments: {FUNCTIONS[name].usage}")
        known = [*FAMILIES, "x0", "x1", "y0", "dy0", "default0", *self._params, *CONSTANTS]
        example = name if param_name_problem(name) is None else "alpha"
        raise self._error(
            node,
            f"unknown name {quoted(name)}.{did_you_mean(name, known)} "
            "Names are x, y, dy, default, with or without an index, "
            f"pi, inf, nan, and {declared_params_text(self._params)}; declare a param: params={{{example!r}: 1.0}}",
        )

    def _compare(self, node: ast.Compare, depth: int) -> Call:
        symbols = []
        operands = [node.left, *node.comparators]
        for op, left in zip(node.ops, operands, strict=False):
            symbol = _COMPARISONS.get(type(op))
            if symbol is None:
                raise self._error(left, "`in` and `is` are not in the language: compare with < <= > >= == !=")
            symbols.append(symbol)
        parts = tuple(self._read(operand, depth + 1) for operand in operands)
        return Call("compare", parts, self._between(node.left, symbols[0]), comparisons=tuple(symbols))

    def _call(self, node: ast.Call, depth: int) -> Call:
        if not isinstance(node.func, ast.Name):
            raise self._error(node, f"only a function's name can be called: {ALLOWED}")
        name = node.func.id
        function = FUNCTIONS.get(name)
        if function is None:
            what = "a param" if name in self._params else "a variable" if split_variable(name) else None
            if what is not None:
                raise self._error(node, f"{name!r} is {what}, not a function: write {name} * (…) for a product")
            raise self._error(
                node,
                f"unknown function {quoted(name)}.{did_you_mean(name, FUNCTIONS)} Functions: {', '.join(FUNCTIONS)}",
            )
        if name in ("each", "first", IGNORE_DY):
            whole = "formula of a gradient" if name == IGNORE_DY else "expression"
            raise self._error(node, f"{name}(…) is allowed only around the whole {whole}")
        axes, positional = self._signature(node, function)
        offset = self._source.start(node)
        if name == "cast" and isinstance(positional[1], ast.Constant) and isinstance(positional[1].value, str):
            return Call(name, (self._read(positional[0], depth + 1),), offset, dtype=self._dtype(positional[1]))
        arguments = tuple(self._read(argument, depth + 1) for argument in positional)
        return Call(SPELLINGS.get(name, name), arguments, offset, axes=axes)

    def _signature(self, node: ast.Call, function: Function) -> tuple[Axes | None, list[ast.expr]]:
        """Returns the axes and the positional arguments of a call; refuses calls that do not fit the function."""
        positional = list(node.args)
        for argument in positional:
            if isinstance(argument, ast.Starred):
                raise self._error(argument, f"* before an argument is not allowed: {function.usage}")
        axis: ast.expr | None = None
        for word in node.keywords:
            if word.arg != "axis" or function.axis is None:
                raise invalid_expression(
                    self._source.text,
                    self._source.start(word),
                    f"{function.name} takes no keyword {quoted(word.arg or '**')}: {function.usage}",
                )
            if axis is not None:
                raise self._error(word.value, "the axis is given twice")
            axis = word.value
        if function.axis and axis is None and len(positional) == 2:
            axis = positional.pop()
        if function.axis is False and len(positional) > 1:
            other = {"max": "maximum", "min": "minimum"}[function.name]
            raise self._error(
                node,
                f"{function.name} reduces one value over an axis, {function.name}(v, axis=0); "
                f"element by element it is {other}(a, b)",
            )
        if len(positional) < function.least or (function.most is not None and len(positional) > function.most):
            wanted = str(function.least) if function.most == function.least else f"{function.least} or more"
            noun = "argument" if wanted == "1" else "arguments"
            raise self._error(node, f"{function.name} takes {wanted} {noun}, not {len(positional)}: {function.usage}")
        if function.axis is None:
            return None, positional
        if axis is None:
            return (_LAST_AXIS if function.name.endswith("softmax") else EVERYTHING), positional
        return self._axes(axis), positional

    def _axes(self, node: ast.expr) -> Axes:
        if _is_none(node):
            return EVERYTHING
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in ("sample", "channel"):
                return Axes(node.value)
            raise self._error(node, f"unknown axis {quoted(node.value)}: {_AXES}")
        entries = node.elts if isinstance(node, ast.Tuple) else [node]
        axes = tuple(self._axis(entry) for entry in entries)
        if not axes:
            raise self._error(node, "an empty tuple of axes reduces nothing; axis=None reduces everything")
        if len(set(axes)) != len(axes):
            raise self._error(node, "an axis occurs twice")
        return Axes("list", axes)

    def _axis(self, node: ast.expr) -> int:
        sign = 1
        inner = node
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            sign, inner = -1, node.operand
        value = inner.value if isinstance(inner, ast.Constant) else None
        if isinstance(value, int) and not isinstance(value, bool) and value < 256:
            return sign * value
        raise self._error(node, _AXES)

    def _dtype(self, node: ast.Constant) -> int:
        dtype = TYPES_BY_NAME.get(str(node.value))
        if dtype is None:
            near = did_you_mean(str(node.value), TYPES_BY_NAME)
            raise self._error(
                node, f"unknown type {quoted(str(node.value))}.{near} Types are {', '.join(TYPES_BY_NAME)}"
            )
        return dtype

    def _between(self, left: ast.expr, symbol: str) -> int:
        """Returns the offset of the operator after `left`; parentheses may be between them."""
        end = self._source.end(left)
        found = self._source.text.find(symbol, end)
        return end if found < 0 else found

    def _error(self, node: ast.expr, message: str) -> GradruleError:
        return invalid_expression(self._source.text, self._source.start(node), message)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
