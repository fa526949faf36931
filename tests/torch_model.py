"""The decoder's weights in transformers' Llama; tests that need it skip where torch is absent."""

import numpy as np
import pytest


def torch():
    """The torch module."""
    return pytest.importorskip("torch")


def llama(spec, tree):
    """The same weights in transformers' Llama."""
    tensor = torch().tensor
    library = pytest.importorskip("transformers")
    model = library.LlamaForCausalLM(library.LlamaConfig(
        vocab_size=spec.vocab, hidden_size=spec.d_model, intermediate_size=spec.ff,
        num_hidden_layers=spec.layers, num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads, head_dim=spec.head_size, rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tied, rope_parameters=rope(spec)))
    model.load_state_dict({name: tensor(np.ascontiguousarray(value))
                           for name, value in state(spec, tree).items()})
    return model.eval()


def rope(spec):
    """The rotary settings under transformers' names."""
    scaling = spec.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": spec.rope_base}
    found = {"rope_type": scaling.kind, "factor": scaling.factor, "rope_theta": spec.rope_base}
    if scaling.kind == "llama3":
        found |= {"low_freq_factor": scaling.low_frequency,
                  "high_freq_factor": scaling.high_frequency,
                  "original_max_position_embeddings": scaling.original_context}
    return found


def state(spec, tree):
    """The tree's arrays under transformers' names and in its layout."""
    result = {"model.embed_tokens.weight": tree["embedding"], "model.norm.weight": tree["norm"],
              "lm_head.weight": tree["embedding"] if spec.tied else tree["head"].T}
    short = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    for n in range(spec.layers):
        attention = {name: leaf[n] for name, leaf in tree["blocks"]["attention"].items()}
        mlp = {name: leaf[n] for name, leaf in tree["blocks"]["mlp"].items()}
        at = f"model.layers.{n}."
        result |= {at + "input_layernorm.weight": attention["norm"],
                   at + "post_attention_layernorm.weight": mlp["norm"],
                   at + "self_attn.o_proj.weight": attention["out"].reshape(-1, spec.d_model).T}
        result |= {f"{at}self_attn.{other}.weight": attention[name].reshape(spec.d_model, -1).T
                   for name, other in short.items()}
        result |= {f"{at}mlp.{name}_proj.weight": mlp[name].T for name in ("gate", "up", "down")}
    return result
