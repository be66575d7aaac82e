"""Generates random programs of nested functions, loops and branches as data; they alone define what runs where.

`nested_graphs` builds them with TensorFlow's control flow, `nested_reference` computes them without it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

UNARY = ("Sign", "Floor", "Tanh", "Sigmoid", "Relu", "Square", "Sin", "Neg", "Abs", "Softplus")
BINARY = ("AddV2", "Sub", "Mul", "Maximum")
MAX_DEPTH = 3
MAX_OPS = 220
"""Ops that a program runs at most, with loops unrolled."""


@dataclass
class Block:
    """Holds statements over named vectors. `params`: names of its arguments; `results`: names of what it returns."""

    params: list[str]
    statements: list[Statement] = field(default_factory=list)
    results: list[str] = field(default_factory=list)


@dataclass
class Statement:
    """Makes one vector, called `name`, from others."""

    name: str
    args: list[str]


@dataclass
class Op(Statement):
    """Applies one op element by element."""

    op_type: str


@dataclass
class Call(Statement):
    """Calls a function on two vectors."""

    function: str


@dataclass
class Loop(Statement):
    """Runs a while loop. `args`: initial states, one for each param of the body; its result is the first state.

    trips: a number; "fed": the placeholder `k`; "value": until the first state's absolute sum reaches `limit`, at most
    three times. collect: the result is the sum of the first state after each iteration, stored in a TensorArray.
    """

    body: Block
    trips: int | str
    limit: float = 0.0
    collect: bool = False


@dataclass
class Map(Statement):
    """Runs `tf.map_fn` over the rows of the placeholder `rows`, or over `args` stacked; sums the results."""

    body: Block


@dataclass
class Scan(Statement):
    """Runs `tf.scan` over rows as in `Map` from `initial`; returns the last result or the sum of all."""

    body: Block
    initial: str
    last: bool


@dataclass
class Branch(Statement):
    """Runs If (two branches, by whether the sum of the first arg exceeds `limit`) or Case.

    by: "sum" for If; for Case "fed" (the placeholder `k`) or "size" (the rounded absolute sum of the first arg).
    """

    branches: list[Block]
    by: str
    limit: float = 0.0


CONSTRUCTS: dict[type[Statement], str] = {Call: "function", Loop: "loop", Map: "loop", Scan: "loop", Branch: "branch"}


@dataclass
class Program:
    """Holds a program: `top` has the params x and w, vectors; placeholders are `rows` (float64) and `k` (int32)."""

    size: int
    n_rows: int
    functions: dict[str, Block]
    top: Block


@dataclass(frozen=True)
class Place:
    """Describes an op where it runs. name: as the server reports it. kinds: constructs around it, outermost first."""

    name: str
    op_type: str
    kinds: tuple[str, ...]


def container(statement: Statement, path: str) -> str:
    """Returns the path of a construct's body; TensorFlow names scopes of map_fn's loop, Case and calls like it."""
    inner = {Call: "/PartitionedCall", Map: "/while", Scan: "/while"}.get(type(statement), "")
    if isinstance(statement, Branch) and statement.by != "sum":
        inner = "/indexed_case"
    return f"{path}{statement.name}{inner}/"


def blocks_of(statement: Statement, program: Program) -> list[Block]:
    """Returns the blocks of a construct."""
    if isinstance(statement, Call):
        return [program.functions[statement.function]]
    if isinstance(statement, Branch):
        return statement.branches
    return [statement.body] if isinstance(statement, Loop | Map | Scan) else []


def places(program: Program) -> list[Place]:
    """Iterates over every op that may run, once for each way to reach it."""

    def walk(block: Block, path: str, kinds: tuple[str, ...]) -> Iterator[Place]:
        for statement in block.statements:
            if isinstance(statement, Op):
                yield Place(path + statement.name, statement.op_type, kinds)
            for inner in blocks_of(statement, program):
                yield from walk(inner, container(statement, path), (*kinds, CONSTRUCTS[type(statement)]))

    return list(walk(program.top, "", ()))


def statements(program: Program) -> Iterator[Statement]:
    """Iterates over every statement once."""

    def walk(block: Block) -> Iterator[Statement]:
        for statement in block.statements:
            yield statement
            if not isinstance(statement, Call):
                for inner in blocks_of(statement, program):
                    yield from walk(inner)

    yield from walk(program.top)
    for function in program.functions.values():
        yield from walk(function)


def most_ops(program: Program) -> int:
    """Returns the number of ops that run if every branch takes its longest path."""

    def cost(block: Block) -> int:
        return sum(statement_cost(statement) for statement in block.statements)

    def statement_cost(statement: Statement) -> int:
        inner = max(map(cost, blocks_of(statement, program)), default=1)
        if isinstance(statement, Loop):
            return inner * (statement.trips if isinstance(statement.trips, int) else 3)
        if isinstance(statement, Map | Scan):
            return inner * (len(statement.args) or program.n_rows)
        return inner

    return cost(program.top)


def generate(rng: random.Random) -> Program:
    """Returns a program with a construct at its top level; repeats drawing while one would run too long."""
    while True:
        program = _Generator(rng).program()
        if most_ops(program) <= MAX_OPS:
            return program


class _Generator:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._count = 0
        self._functions: dict[str, Block] = {}
        self._depths: dict[str, int] = {}

    def program(self) -> Program:
        top = self._block(["x", "w"], ["x", "w"], 0)
        return Program(self._rng.randint(2, 4), self._rng.randint(2, 3), self._functions, top)

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"

    def _block(self, params: list[str], visible: list[str], depth: int, n_results: int = 1) -> Block:
        """Draws a block; `visible`: the params and the vectors of enclosing blocks."""
        rng, block = self._rng, Block(list(params))
        seen = list(visible)
        constructs = rng.randint(1, 2) if depth == 0 else rng.choice([0, 1, 1, 2]) if depth < MAX_DEPTH else 0
        kinds = ["construct"] * constructs + ["op"] * rng.randint(1, 3)
        rng.shuffle(kinds)
        for kind in kinds:
            statement = self._construct(seen, depth) if kind == "construct" else self._op(seen)
            block.statements.append(statement)
            # Prefer the newest vectors.
            seen += [statement.name, statement.name]
        used = {name for statement in block.statements for name in statement.args}
        # Use every vector, so that none is computed in vain.
        left = [item.name for item in block.statements if item.name not in used and not isinstance(item, Op)]
        for _ in range(n_results):
            first = left.pop() if left else self._pick(seen)
            both = Op(self._name("op"), [first, seen[-1]], rng.choice(BINARY))
            # Keep results small, for any number of iterations.
            bounded = Op(self._name("op"), [both.name], rng.choice(["Tanh", "Sin"]))
            block.statements += [both, bounded]
            block.results.append(bounded.name)
        return block

    def _pick(self, seen: list[str]) -> str:
        return self._rng.choice(seen)

    def _op(self, seen: list[str]) -> Op:
        if self._rng.random() < 0.7:
            # The ops at the front of the list have no gradient, so few ops are far from a result.
            return Op(self._name("op"), [self._pick(seen)], self._rng.choice(UNARY + UNARY[2:]))
        return Op(self._name("op"), [self._pick(seen), self._pick(seen)], self._rng.choice(BINARY))

    def _construct(self, seen: list[str], depth: int) -> Statement:
        make = self._rng.choice(
            [self._call, self._call, self._loop, self._loop, self._map, self._scan, self._if, self._if, self._case]
        )
        return make(seen, depth)

    def _call(self, seen: list[str], depth: int) -> Call:
        """Calls an existing function, unless it is too deep, or a new one."""
        fitting = [name for name, inner in self._depths.items() if depth + inner <= MAX_DEPTH]
        if fitting and self._rng.random() < 0.5:
            function = self._rng.choice(fitting)
        else:
            before = dict(self._depths)
            function = self._name("fun")
            params = [self._name("arg"), self._name("arg")]
            body = self._block(params, params, depth + 1)
            self._functions[function] = body
            self._depths = {**before, **self._depths, function: MAX_DEPTH - depth}
        return Call(self._name("call"), [self._pick(seen), self._pick(seen)], function)

    def _loop(self, seen: list[str], depth: int) -> Loop:
        rng = self._rng
        states = [self._name("state") for _ in range(rng.randint(1, 2))]
        body = self._block(states, seen + states * 2, depth + 1, len(states))
        if len(states) == 2 and rng.random() < 0.3:
            # An invariant loop variable.
            body.results[1] = states[1]
        choices: list[int | str] = [0, 1, 2, 2, 3, "fed", "fed", "value", "value"]
        trips = rng.choice(choices)
        collect = isinstance(trips, int) and trips > 0 and rng.random() < 0.5
        return Loop(
            self._name("turn"), [self._pick(seen) for _ in states], body, trips, rng.choice([0.37, 1.41, 2.73]), collect
        )

    def _rows(self, seen: list[str]) -> list[str]:
        """Returns None for the placeholder's rows, or names of vectors."""
        return [] if self._rng.random() < 0.5 else [self._pick(seen) for _ in range(self._rng.randint(1, 3))]

    def _map(self, seen: list[str], depth: int) -> Map:
        row = self._name("row")
        return Map(self._name("map"), self._rows(seen), self._block([row], [*seen, row, row], depth + 1))

    def _scan(self, seen: list[str], depth: int) -> Scan:
        params = [self._name("sum"), self._name("row")]
        body = self._block(params, seen + params * 2, depth + 1)
        return Scan(self._name("scan"), self._rows(seen), body, self._pick(seen), self._rng.random() < 0.5)

    def _if(self, seen: list[str], depth: int) -> Branch:
        branches = [self._block([], seen, depth + 1) for _ in range(2)]
        return Branch(self._name("fork"), [self._pick(seen)], branches, "sum", self._rng.choice([-0.63, 0.17, 0.59]))

    def _case(self, seen: list[str], depth: int) -> Branch:
        branches = [self._block([], seen, depth + 1) for _ in range(self._rng.randint(2, 3))]
        return Branch(self._name("fork"), [self._pick(seen)], branches, self._rng.choice(["fed", "size"]))
