"""Implements layer-wise relevance propagation through linear ops and sums.

R is the relevance at the output, which arrives as the upstream gradient; the rule gives that of the data. Weights and
bias get none. Formulas are those of zennit 0.5.1 (Anders et al. 2021, arXiv:2106.13200), written with v⁺ = max(v, 0),
v⁻ = min(v, 0), ∘ for the elementwise product, and st(z) = z + eps·sgn(z) with sgn(0) = +1.

Where st(z) is 0, which takes eps = 0, the quotient R/st(z) is 0: an output that nothing contributed to passes nothing
on, where zennit gives NaN or an infinity. 16-bit types are calculated in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from gradrule_server.engine.code_rules.common import RuleTarget, dense, wide
from gradrule_server.engine.code_rules.linear import Linear, negative, positive

Params = Mapping[str, tf.Tensor]
Change = Callable[[tf.Tensor], tf.Tensor]


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
    given = linear.apply(linear.x, linear.w)
    lowest = linear.apply(low, positive(linear.w))
    highest = linear.apply(high, negative(linear.w))
    u = _ratio(linear.cast(dys[0]), given.output - lowest.output - highest.output, linear.cast(params["eps"]))
    return linear.only_data(given.relevance(u) - lowest.relevance(u) - highest.relevance(u))


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
    y = target.outputs[0]
    calculated_in = wide(y.dtype)
    ratio = _ratio(*(tf.cast(value, calculated_in) for value in (dys[0], y, params["eps"])))
    own = target.own_gradients([tf.cast(ratio, y.dtype)])
    # The quotient overflows float16 where y is 0; inputs are usually 0 there, and get 0.
    return [
        None if gradient is None else tf.math.multiply_no_nan(dense(gradient), x)
        for x, gradient in zip(target.inputs, own, strict=True)
    ]


def _epsilon(linear: Linear, r: tf.Tensor, eps: tf.Tensor) -> Sequence[tf.Tensor | None]:
    return linear.only_data(linear.apply(linear.x, linear.w).relevance(_ratio(r, linear.y, eps)))


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
