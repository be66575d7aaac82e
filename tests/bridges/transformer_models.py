"""Builds small models of the transformers library with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers  # type: ignore[import-not-found]


def bert() -> Any:
    """Returns a BERT encoder."""
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    return transformers.BertModel(config)


def gpt2() -> Any:
    """Returns a GPT-2 decoder with its head."""
    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def t5() -> Any:
    """Returns the encoder of a T5."""
    config = transformers.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    return transformers.T5EncoderModel(config)


def whisper() -> Any:
    """Returns the encoder of a Whisper."""
    config = transformers.WhisperConfig(
        num_mel_bins=8, d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=24,
        max_source_positions=12, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=24, vocab_size=40,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.WhisperModel(config).get_encoder()


def _words() -> tuple[torch.Tensor, ...]:
    return torch.randint(1, 40, (3, 7)), torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 4 + [0] * 3])


MODELS: Mapping[str, tuple[Callable[[], Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "BERT": (bert, _words),
    "GPT-2": (gpt2, lambda: (torch.randint(1, 40, (3, 7)),)),
    "T5 encoder": (t5, _words),
    "Whisper encoder": (whisper, lambda: (torch.randn(3, 8, 24),)),
}
"""Models by name, with a function that returns inputs."""


def build(name: str, dtype: torch.dtype) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Returns a model in evaluation mode and inputs."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    return make().eval().to(dtype), tuple(v.to(dtype) if v.is_floating_point() else v for v in inputs())
