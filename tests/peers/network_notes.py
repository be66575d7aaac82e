"""Says why relevances of networks and layers differ from zennit's, by model, preset, and whether norms are folded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_FIRST = "zennit's first layer is one module, {}; gradrule's are all linear layers that the input reaches first: {}"
_PROJECTIONS = _FIRST.format("the query's projection", "the projections of query, key and value")
_STEPS = _FIRST.format("that of the first step", "those of the inputs of all steps")
_WAYS = _FIRST.format("that of the first step forwards", "those of the inputs of all steps both ways")
_NO_ACTIVATION = "zennit 0.5.1 does not count torch.nn.{} as an activation and keeps its gradient; gradrule passes on "
_MISH = _NO_ACTIVATION.format("Mish") + "relevance, as through other activations"
_GLU = _NO_ACTIVATION.format("GLU") + "relevance through the sigmoid of the gate"
_TWO_POOLINGS = (
    "Keras pools one axis after the other, so that eps counts twice; with eps 1e-12 instead of 1e-6 the difference is "
    "2e-8"
)

_FLAT = ("epsilon_plus_flat", "epsilon_alpha2_beta1_flat")
_PASSING = ("epsilon_plus", "epsilon_alpha2_beta1", "epsilon_gamma_box", *_FLAT)
_ALL = (*_PASSING, "excitation_backprop")


def _explanations() -> Iterator[tuple[tuple[str, str, bool], str]]:
    for names, presets, note in (
        (("BERT", "MultiHeadAttention (first)", "GroupQueryAttention (first)"), _FLAT, _PROJECTIONS),
        (("SimpleRNN (first)", "LSTM (first)", "GRU (first)"), _FLAT, _STEPS),
        (("Bidirectional (first)",), _FLAT, _WAYS),
        (("Activation, mish",), _PASSING, _MISH),
        (("Activation, glu",), _PASSING, _GLU),
        (("AdaptiveAveragePooling2D",), _ALL, _TWO_POOLINGS),
    ):
        for name in names:
            for preset in presets:
                yield (name, preset, False), note


EXPLANATIONS: Mapping[tuple[str, str, bool], str] = dict(_explanations())
