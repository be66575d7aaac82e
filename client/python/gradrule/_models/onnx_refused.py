"""Lists ONNX operations that graphs cannot compute, with the reason."""

from __future__ import annotations

from gradrule._models.onnx_calls import OnnxOp, add_op

_SEQUENCES = "graphs have no sequences of tensors; stack them to one tensor"
_OPTIONALS = "graphs have no optional values"
_STRINGS = "graphs compute numbers; encode text before the model"
_RANDOM = "its random numbers would differ from those of other runtimes; make them an input of the model"
_REASONS = {
    _SEQUENCES: (
        "ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
        "SequenceLength", "SequenceMap", "SplitToSequence",
    ),
    _OPTIONALS: ("Optional", "OptionalGetElement", "OptionalHasElement"),
    _STRINGS: ("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"),
    _RANDOM: ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    "decode images before the model": ("ImageDecoder",),
    "TensorFlow has no op for it; use Conv and GridSample": ("DeformConv",),
    "its result depends on a choice of boxes; leave it out of the model and apply it to the outputs": (
        "NonMaxSuppression", "RoiAlign", "MaxRoiPool",
    ),
    "TensorFlow finds the values in another order; leave it out of the model and apply it to the outputs": ("Unique",),
    "needs the output Indices of MaxPool, which is not supported; use Resize or ConvTranspose": ("MaxUnpool",),
    "use DFT of frames": ("STFT",),
    "compute the matrix before, and make it an initialiser": ("MelWeightMatrix",),
    "use ScatterElements": ("TensorScatter",),
    "was replaced by Resize": ("Upsample",),
}  # fmt: skip

for _reason, _names in _REASONS.items():
    for _name in _names:
        add_op(_name, OnnxOp(None, differentiable=False, refuses=_reason))
