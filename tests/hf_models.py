"""Tiny models of every family, built by transformers with random float32 weights."""

import pathlib

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
WINDOW = 5
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}


def library():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


def configuration(name, **changes):
    """The family's configuration, with all that sets it apart at work within 16 tokens."""
    own = {
        "llama": {"head_dim": 16, "rope_scaling": LLAMA3, "rope_theta": 500.0},
        "qwen2": {"tie_word_embeddings": True, "rope_theta": 500.0},
        "qwen3": {"head_dim": 16, "rope_theta": 500.0},
        "gemma2": {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 12,
                   "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        "gemma3": {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 12,
                   "sliding_window_pattern": 3, "rope_theta": 5000.0, "rope_local_base_freq": 50.0,
                   "rope_scaling": {"rope_type": "linear", "factor": 4.0}}}[name]
    kind = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config",
            "gemma2": "Gemma2Config", "gemma3": "Gemma3TextConfig"}[name]
    return getattr(library(), kind)(**(SHAPE | own | changes))


def model(name, seed=0, **changes):
    """A model whose norms and biases are random too."""
    from torch import randn_like
    from torch.random import manual_seed

    manual_seed(seed)
    made = library().AutoModelForCausalLM.from_config(configuration(name, **changes),
                                                      attn_implementation="eager").float().eval()
    for weight in made.parameters():
        weight.data += randn_like(weight) * (0.3 if weight.ndim == 1 else 0.2)
    return made


def save(made, folder, **how) -> pathlib.Path:
    made.save_pretrained(folder, **how)
    return pathlib.Path(folder)


def logits(made, tokens, mask=None):
    import torch

    with torch.no_grad():
        mask = None if mask is None else torch.tensor(mask)
        return made(torch.tensor(np.asarray(tokens), dtype=torch.long),
                    attention_mask=mask).logits.numpy()
