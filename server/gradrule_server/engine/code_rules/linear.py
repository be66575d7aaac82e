"""Implements rules for linear ops: layer-wise relevance propagation (LRP) and feedback alignment.

With data x, weights W and a bias b that may be missing, the output of a linear op is Wx + b.

LRP: R is the relevance at the output, which arrives as the upstream gradient; the rule returns the relevance of the
data. Weights and bias get none. Formulas are those of zennit 0.5.1 (Anders et al. 2021, arXiv:2106.13200), written with
v⁺ = max(v, 0), v⁻ = min(v, 0), ∘ for the elementwise product, and st(z) = z + eps·sgn(z) with sgn(0) = +1. Where st(z)
is 0, which takes eps = 0, the quotient R/st(z) is 0: an output to which nothing contributes passes no relevance on,
while zennit returns NaN or an infinity. 16-bit types are calculated in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import tensorflow as tf

from gradrule_server.engine.code_rules.target import RuleTarget, dense, not_applicable, repeated, unrounded, wide
from gradrule_server.engine.op_gradients import own_gradients
from gradrule_server.policy.op_tables import input_numbers, ops_with

Params = Mapping[str, tf.Tensor]
Change = Callable[[tf.Tensor], tf.Tensor]

_OPERANDS = input_numbers("linear_operands")
_MATRIX_PRODUCTS = ops_with("matrix_product")
_MOVES = input_numbers("moves_elements")
_PADS = frozenset({"Pad"})
_BIAS_ADDS = ops_with("plain_add") | {"BiasAdd"}

_MEANT_FOR = (
    "linear ops of real numbers, such as MatMul, Einsum and Conv2D, one of whose operands depends on the xs, alone or "
    "with the addition of their bias"
)


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """A linear layer, without its bias, applied to data `x`.

    Attributes:
        x: The data.
        output: Wx.
        path: The ops from x to the output, each with the number of the input that leads to x.
    """

    x: tf.Tensor
    output: tf.Tensor
    path: Sequence[tuple[tf.Operation, int]]

    def transposed(self, r: tf.Tensor) -> tf.Tensor:
        """Returns Wᵀr, of the shape of x: the ops' own gradients for `r` at the output."""
        r = _sum_to(r, self.output)
        for op, number in reversed(self.path):
            r = own_gradients(op, r)[number]
        return r

    def relevance(self, r: tf.Tensor) -> tf.Tensor:
        """Returns x∘Wᵀr: the share of each element of x in the outputs, each output weighted by `r`."""
        return self.x * self.transposed(r)


class Linear:
    """A linear layer: a linear op, ops that move elements of its data or its output, and the addition of a bias.

    Raises RULE_NOT_APPLICABLE for other targets, and where both operands of the op depend on the same x.

    Attributes:
        op: The linear op of the forward graph.
        x, w, bias: Data, weights and bias (or None); in float32 if the target's type has 16 bits, as what rules divide
            by is often so small that the quotient overflows float16.
        w_operand: The number of the op's input that holds the weights.
    """

    def __init__(self, target: RuleTarget, rule: str) -> None:
        # Others compute sizes, such as those that a transposed convolution takes.
        ops = [op for op in target.ops if op.outputs and op.outputs[0].dtype.is_floating]
        place = next((number for number, op in enumerate(ops) if op.type in _OPERANDS), None)
        if place is None:
            raise not_applicable(target, rule, _MEANT_FOR)
        self._paddings, linear, others = ops[:place], ops[place], ops[place + 1 :]
        last = others[-1] if others else None
        self._bias_add = last if last is not None and last.type in _BIAS_ADDS else None
        self._moves = others if self._bias_add is None else others[:-1]
        operands = _OPERANDS[linear.type]
        self._inputs = {source.ref(): value for source, value in zip(target.sources, target.inputs, strict=True)}
        padded = self._paddings[-1].outputs[0] if self._paddings else None
        used = [linear.inputs[number] for number in operands if number < len(linear.inputs)]
        is_padded = [value is padded for value in used]
        used = [self._paddings[0].inputs[0] if value is padded else value for value in used]
        if self._bias_add is not None:
            before = (self._moves[-1] if self._moves else linear).outputs[0]
            used += [value for value in self._bias_add.inputs if value is not before]
        if (
            len(linear.inputs) != max(operands) + 1
            or (padded is not None and sum(is_padded) != 1)
            or any(_MOVES.get(op.type) != (0,) and op.type not in _PADS for op in self._paddings)
            or any(_MOVES.get(move.type) != (0,) for move in self._moves)
            or any(value.ref() not in self._inputs for value in used)
        ):
            raise not_applicable(target, rule, _MEANT_FOR)
        self.op = linear
        if padded is None:
            self._data_operand, self.w_operand = _data_and_weights(target, rule, linear, operands)
        else:
            self._data_operand, self.w_operand = operands if is_padded[0] else operands[::-1]
        data = linear.inputs[self._data_operand] if padded is None else self._paddings[0].inputs[0]
        self._data_place = _place(target.sources, data)
        self._n_inputs = len(target.inputs)
        self._dtype = linear.outputs[0].dtype
        self.dtype = wide(self._dtype)
        self.x = self._input(data)
        self.w = self._input(linear.inputs[self.w_operand])
        self.bias = None
        if self._bias_add is not None:
            self._sum_operand = _place(self._bias_add.inputs, before)
            self.bias = self._input(self._bias_add.inputs[1 - self._sum_operand])
        self._output = target.outputs[0]

    @cached_property
    def given(self) -> Applied:
        """The layer, without the bias, applied to its own data."""
        return self.apply(self.x, self.w)

    @cached_property
    def y(self) -> tf.Tensor:
        """The output, with the bias, in the type of the calculation."""
        return unrounded(self._output, lambda: self.add_bias(self.given.output, tf.identity))

    def apply(self, x: tf.Tensor, w: tf.Tensor) -> Applied:
        """Applies the layer, without the bias, to other data and weights of the same shapes."""
        # Params have no static shape, and what is computed with them has none either.
        w.set_shape(self.w.shape)
        value, path = x, []
        for padding in self._paddings:
            value = repeated(padding, [value, *list(padding.inputs)[1:]])
            path.append((value.op, 0))
        operands = list(self.op.inputs)
        operands[self._data_operand], operands[self.w_operand] = value, w
        value = repeated(self.op, operands)
        path.append((value.op, self._data_operand))
        for move in self._moves:
            value = repeated(move, [value, *list(move.inputs)[1:]])
            path.append((value.op, 0))
        return Applied(x, value, path)

    def add_bias(self, z: tf.Tensor, change: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Returns z + change(b); z if the target has no bias."""
        if self._bias_add is None or self.bias is None:
            return z
        operands = [z, change(self.bias)]
        return repeated(self._bias_add, operands[:: -1 if self._sum_operand else 1])

    def cast(self, value: tf.Tensor) -> tf.Tensor:
        """Casts an upstream gradient or a param to the type of the calculation."""
        return tf.cast(value, self.dtype)

    def only_data(self, gradient: tf.Tensor) -> list[tf.Tensor | None]:
        """Returns the gradients of a rule: `gradient` for the data, None for weights and bias."""
        found: list[tf.Tensor | None] = [None] * self._n_inputs
        found[self._data_place] = tf.cast(gradient, self._dtype)
        return found

    def _input(self, source: tf.Tensor) -> tf.Tensor:
        """Returns an input of the target in the graph of gradients and the type of the calculation."""
        return tf.cast(self._inputs[source.ref()], self.dtype)


def _data_and_weights(
    target: RuleTarget, rule: str, linear: tf.Operation, operands: tuple[int, ...]
) -> tuple[int, int]:
    """Returns the numbers of the inputs that hold data and weights.

    The data are the first input of the target, unless only the other operand depends on the xs.
    """
    data, weights = operands
    values = [linear.inputs[number] for number in operands]
    on_data, on_weights = map(target.dependence.bits, values)
    if bool(on_data) != bool(on_weights):
        return (data, weights) if on_data else (weights, data)
    if on_data & on_weights and not _are_weights_of(target, values, (on_data, on_weights)):
        raise not_applicable(target, rule, f"{_MEANT_FOR}; here both operands depend on the same x")
    if on_data & on_weights:
        return (weights, data) if target.dependence.is_x(values[0]) else (data, weights)
    is_second = target.sources[0].ref() == values[1].ref() != values[0].ref()
    return (weights, data) if is_second else (data, weights)


def _are_weights_of(target: RuleTarget, values: Sequence[tf.Tensor], bits: tuple[int, int]) -> bool:
    """Returns whether one of two operands is an x itself, and the other depends on a further x."""
    are_xs = [target.dependence.is_x(value) for value in values]
    if are_xs[0] == are_xs[1]:
        return False
    own, other = bits if are_xs[0] else bits[::-1]
    return bool(other & ~own)


def _place(tensors: Iterable[tf.Tensor], wanted: tf.Tensor) -> int:
    return [tensor.ref() for tensor in tensors].index(wanted.ref())


def positive(value: tf.Tensor) -> tf.Tensor:
    """Returns v⁺ = max(v, 0)."""
    return tf.maximum(value, tf.zeros([], value.dtype))


def negative(value: tf.Tensor) -> tf.Tensor:
    """Returns v⁻ = min(v, 0)."""
    return tf.minimum(value, tf.zeros([], value.dtype))


def _sum_to(r: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Returns `r` summed over the axes along which `like` is broadcast to it, as for a bias with more rows than Wx."""
    if r.shape.is_fully_defined() and r.shape == like.shape:
        return r
    axes, _ = tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(like), s1=tf.shape(r))
    return tf.reshape(tf.reduce_sum(r, axes), tf.shape(like))


def lrp_epsilon(target: RuleTarget, dys: Sequence[tf.Tensor], params: Params) -> Sequence[tf.Tensor | None]:
    """Returns x ∘ Wᵀ(R/st(Wx+b)). Bach et al. 2015, doi:10.1371/journal.pone.0130140, eq. 58.

    The bias and eps take their share of the relevance.
    """
    linear = Linear(target, "lrp_epsilon")
    return _epsilon(linear, linear.cast(dys[0]), linear.cast(params["eps"]))


def lrp_0(target: RuleTarget, dys: Sequence[tf.Tensor], params: Params) -> Sequence[tf.Tensor | None]:
    """Returns x ∘ Wᵀ(R/(Wx+b)): lrp_epsilon without eps. Bach et al. 2015, eq. 56. An output of 0 passes nothing on."""
    linear = Linear(target, "lrp_0")
    return _epsilon(linear, linear.cast(dys[0]), tf.zeros([], linear.dtype))


def lrp_zplus(target: RuleTarget, dys: Sequence[tf.Tensor], params: Params) -> Sequence[tf.Tensor | None]:
    """Returns x⁺∘W⁺ᵀu + x⁻∘W⁻ᵀu, u = R/st(W⁺x⁺ + W⁻x⁻ + b⁺): only positive contributions count.

    Montavon et al. 2017, arXiv:1512.02479 (z⁺, for x ≥ 0); zennit extends it to negative x. An output without positive
    contributions passes nothing on.
    """
    linear = Linear(target, "lrp_zplus")
    r, eps = linear.cast(dys[0]), linear.cast(params["eps"])
    return linear.only_data(_by_sign(linear, r, eps, positive(linear.w), negative(linear.w), positive))


def lrp_alpha_beta(target: RuleTarget, dys: Sequence[tf.Tensor], params: Params) -> Sequence[tf.Tensor | None]:
    """Returns alpha·zplus − beta·(x⁺∘W⁻ᵀu + x⁻∘W⁺ᵀu), u = R/st(W⁻x⁺ + W⁺x⁻ + b⁻). Bach et al. 2015, eq. 60.

    Relevance is kept where alpha − beta = 1 and each output has contributions of both signs.
    """
    linear = Linear(target, "lrp_alpha_beta")
    r, eps = linear.cast(dys[0]), linear.cast(params["eps"])
    w_plus, w_minus = positive(linear.w), negative(linear.w)
    supporting = _by_sign(linear, r, eps, w_plus, w_minus, positive)
    opposing = _by_sign(linear, r, eps, w_minus, w_plus, negative)
    return linear.only_data(linear.cast(params["alpha"]) * supporting - linear.cast(params["beta"]) * opposing)


def lrp_gamma(target: RuleTarget, dys: Sequence[tf.Tensor], params: Params) -> Sequence[tf.Tensor | None]:
    """Returns, with P = W+γW⁺, N = W+γW⁻ and z = Wx+b, the sum of two terms.

    Where z > 0: x⁺∘Pᵀu + x⁻∘Nᵀu, u = R/st(Px⁺ + Nx⁻ + b+γb⁺).
    Where z < 0: x⁺∘Nᵀu + x⁻∘Pᵀu, u = R/st(Nx⁺ + Px⁻ + b+γb⁻).

    Montavon et al. 2019, doi:10.1007/978-3-030-28954-6_10; for data of both signs: Andéol et al. 2021. Where z = 0
    nothing is passed on. gamma = 0 is lrp_epsilon.
    """
    linear = Linear(target, "lrp_gamma")
    r, eps, gamma = linear.cast(dys[0]), linear.cast(params["eps"]), linear.cast(params["gamma"])

    def more_positive(value: tf.Tensor) -> tf.Tensor:
        return value + gamma * positive(value)

    def more_negative(value: tf.Tensor) -> tf.Tensor:
        return value + gamma * negative(value)

    nothing = tf.zeros([], linear.dtype)
    p, n = more_positive(linear.w), more_negative(linear.w)
    excited = _by_sign(linear, tf.where(linear.y > 0, r, nothing), eps, p, n, more_positive)
    inhibited = _by_sign(linear, tf.where(linear.y < 0, r, nothing), eps, n, p, more_negative)
    return linear.only_data(excited + inhibited)


def lrp_zbox(target: RuleTarget, dys: Sequence[tf.Tensor], params: Params) -> Sequence[tf.Tensor | None]:
    """Returns x∘Wᵀu − l∘W⁺ᵀu − h∘W⁻ᵀu, u = R/st(Wx − W⁺l − W⁻h), for a first layer whose x lies between l and h.

    Montavon et al. 2017, arXiv:1512.02479 (z^B). `low`, `high`: numbers or tensors that broadcast to x as in NumPy. The
    bias cancels out.
    """
    linear = Linear(target, "lrp_zbox")
    low, high = (tf.broadcast_to(linear.cast(params[name]), tf.shape(linear.x)) for name in ("low", "high"))
    lowest = linear.apply(low, positive(linear.w))
    highest = linear.apply(high, negative(linear.w))
    u = _ratio(linear.cast(dys[0]), linear.given.output - lowest.output - highest.output, linear.cast(params["eps"]))
    return linear.only_data(linear.given.relevance(u) - lowest.relevance(u) - highest.relevance(u))


def lrp_wsquare(target: RuleTarget, dys: Sequence[tf.Tensor], params: Params) -> Sequence[tf.Tensor | None]:
    """Returns (W²)ᵀ(R/st(W²·1 + b²)), for a first layer whose x is unbounded: x itself does not matter.

    Montavon et al. 2017, arXiv:1512.02479 (w²). The bias takes its share.
    """
    linear = Linear(target, "lrp_wsquare")
    squared = linear.apply(tf.ones_like(linear.x), tf.square(linear.w))
    u = _ratio(linear.cast(dys[0]), linear.add_bias(squared.output, tf.square), linear.cast(params["eps"]))
    return linear.only_data(squared.transposed(u))


def lrp_flat(target: RuleTarget, dys: Sequence[tf.Tensor], params: Params) -> Sequence[tf.Tensor | None]:
    """Returns 1ᵀ(R/st(1·1)): lrp_wsquare with all weights 1 and no bias, so each output's relevance is spread evenly.

    Lapuschkin et al. 2019, arXiv:1902.10178.
    """
    linear = Linear(target, "lrp_flat")
    even = linear.apply(tf.ones_like(linear.x), tf.ones_like(linear.w))
    u = _ratio(linear.cast(dys[0]), even.output, linear.cast(params["eps"]))
    return linear.only_data(even.transposed(u))


def lrp_norm(target: RuleTarget, dys: Sequence[tf.Tensor], params: Params) -> Sequence[tf.Tensor | None]:
    """Returns x ∘ vjp(R/st(y)) for each input x: lrp_epsilon for ops without weights, linear in all inputs together.

    For Add, AddV2, AddN, AvgPool, Mean, Sum: zennit, Norm. vjp is the op's own gradient.
    """
    y, op = target.outputs[0], target.op
    dtype = wide(y.dtype)
    dy, eps = tf.cast(dys[0], dtype), tf.cast(params["eps"], dtype)
    if dtype == y.dtype or op is None:
        # A subgraph keeps its types, because its ops may convert them.
        own = target.own_gradients([tf.cast(_ratio(dy, tf.cast(y, dtype), eps), y.dtype)])
    else:
        again = repeated(op, target.inputs)
        own = own_gradients(again.op, _ratio(dy, unrounded(y, lambda: again), eps))
    # The quotient overflows where y is 0; inputs are usually 0 there, and get 0.
    return [
        None if gradient is None else tf.cast(tf.math.multiply_no_nan(gradient, tf.cast(x, gradient.dtype)), x.dtype)
        for x, gradient in zip(target.inputs, map(dense, own), strict=True)
    ]


def _epsilon(linear: Linear, r: tf.Tensor, eps: tf.Tensor) -> Sequence[tf.Tensor | None]:
    return linear.only_data(linear.given.relevance(_ratio(r, linear.y, eps)))


def _by_sign(
    linear: Linear, r: tf.Tensor, eps: tf.Tensor, w_of_plus: tf.Tensor, w_of_minus: tf.Tensor, bias: Change
) -> tf.Tensor:
    """Returns x⁺∘Aᵀu + x⁻∘Bᵀu, u = R/st(Ax⁺ + Bx⁻ + bias(b)), for A = `w_of_plus` and B = `w_of_minus`."""
    plus = linear.apply(positive(linear.x), w_of_plus)
    minus = linear.apply(negative(linear.x), w_of_minus)
    u = _ratio(r, linear.add_bias(plus.output + minus.output, bias), eps)
    return plus.relevance(u) + minus.relevance(u)


def _ratio(r: tf.Tensor, z: tf.Tensor, eps: tf.Tensor) -> tf.Tensor:
    """Returns R/st(z), 0 where st(z) is 0."""
    return tf.math.divide_no_nan(r, z + tf.where(z >= 0, eps, -eps))


def feedback_alignment(target: RuleTarget, dys: Sequence[tf.Tensor], params: Params) -> Sequence[tf.Tensor | None]:
    """Returns dx = Bᵀdy with a fixed random B in place of W; weights and bias get their own gradients.

    Lillicrap et al. 2014, arXiv:1411.0247 (2016, doi:10.1038/ncomms13276), where B is uniform too, in a range tuned per
    experiment. Here its deviation is 1/sqrt(n), n = how many outputs one input feeds, so that dx is about as large as
    dy whatever W is. B depends on `seed`, the node's name and the shape of W; it is the same in each step, with and
    without XLA, and but for rounding in each type.
    """
    linear = Linear(target, "feedback_alignment")
    seed = tf.stack([tf.cast(params["seed"], tf.int64), tf.constant(target.salt, tf.int64)])
    # XLA and TensorFlow's kernels draw the same bits, but convert them to different floats.
    bits = tf.random.stateless_uniform(tf.shape(linear.w), seed, minval=None, dtype=tf.int32, alg="philox")
    deviation_one = linear.cast(tf.cast(bits, tf.float32)) * (3**0.5 / 2**31)
    b = deviation_one * tf.math.rsqrt(linear.cast(_outputs_per_input(linear)))
    dx = linear.apply(linear.x, b).transposed(linear.cast(dys[0]))
    own = target.own_gradients(dys)
    return [dense(other) if found is None else found for found, other in zip(linear.only_data(dx), own, strict=True)]


def _outputs_per_input(linear: Linear) -> tf.Tensor:
    """Returns the number of outputs for which an element of x has a weight, without strides and borders."""
    op, shape = linear.op, tf.shape(linear.w)
    if op.type == "Einsum":
        inputs, output = op.get_attr("equation").decode().split("->")
        labels = inputs.split(",")[linear.w_operand]
        return tf.reduce_prod([shape[axis] for axis, label in enumerate(labels) if label in output])
    if op.type in _MATRIX_PRODUCTS:
        attributes = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
        is_transposed = op.get_attr(attributes[linear.w_operand])
        # The product sums over the last axis of the first operand and the last but one of the second.
        return shape[-1 if is_transposed == (linear.w_operand == 0) else -2]
    channel_axis = op.get_attr("data_format").decode().index("C")
    return tf.reduce_prod(shape) // tf.shape(linear.x)[channel_axis]
