"""The gradient of an eigendecomposition where eigenvalues meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from gradrule_server.engine.code_rules.common import not_applicable
from gradrule_server.engine.site import Site


def eigh_lorentzian(
    site: Site, dys: Sequence[tf.Tensor], params: Mapping[str, tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """SelfAdjointEigV2's own gradient with 1/(eⱼ−eᵢ) replaced by d/(d²+eps), d = eⱼ−eᵢ.

    v·(diag(de) + F∘(vᴴdv))·vᴴ with Fᵢⱼ = d/(d²+eps) and 0 on the diagonal; as the op reads the lower triangle only, the
    result is folded there. Matrices: the last two axes. Lorentzian broadening: Liao et al. 2019, arXiv:1903.09650.
    Finite where eigenvalues are equal: such a pair adds nothing, with eps = 0 too. Without eigenvectors among the
    outputs (compute_v) eps does not matter.
    """
    op = site.ops[0]
    if len(site.ops) != 1 or op.type != "SelfAdjointEigV2":
        raise not_applicable(site, "eigh_lorentzian", "SelfAdjointEigV2")
    inner = tf.linalg.diag(dys[0])
    if op.get_attr("compute_v"):
        e, v = site.outputs
        d = e[..., tf.newaxis, :] - e[..., :, tf.newaxis]
        # 0 on the diagonal by itself, as d is 0 there.
        f = tf.math.divide_no_nan(d, tf.square(d) + tf.cast(params["eps"], d.dtype))
        inner += f * tf.linalg.matmul(v, dys[1], adjoint_a=True)
    else:
        _, v = tf.linalg.eigh(site.inputs[0])
    full = tf.linalg.matmul(v, tf.linalg.matmul(inner, v, adjoint_b=True))
    return [_folded(full)]


def _folded(gradient: tf.Tensor) -> tf.Tensor:
    """The gradient for the lower triangle, each element taking along its mirror image."""
    both = tf.linalg.band_part(gradient + tf.linalg.adjoint(gradient), -1, 0)
    return tf.linalg.set_diag(both, tf.linalg.diag_part(both) / 2)
