"""TRL: transformers' generate, GRPOTrainer's update and its whole step, in microbatches of one
prompt."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1",
               "CUDA_VISIBLE_DEVICES": ""}

import tempfile  # noqa: E402
import time  # noqa: E402

import datasets  # noqa: E402
import numpy as np  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
import workload as W  # noqa: E402


def model():
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=W.VOCAB, hidden_size=W.WIDTH, intermediate_size=W.FF,
        num_hidden_layers=W.LAYERS, num_attention_heads=W.HEADS, num_key_value_heads=W.KV_HEADS,
        head_dim=W.SIZE, rms_norm_eps=W.EPS, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": W.ROPE}, pad_token_id=W.PAD,
        bos_token_id=None, eos_token_id=W.END, max_position_embeddings=4096,
        attn_implementation="sdpa")).to(torch.float32)
    given = W.weights()
    pairs = [(made.model.embed_tokens, given["embedding"]), (made.model.norm, given["norm"])]
    for layer, of in zip(made.model.layers, given["layers"]):
        pairs += [(layer.input_layernorm, of["norm1"]),
                  (layer.post_attention_layernorm, of["norm2"]),
                  (layer.self_attn.o_proj, of["o"].reshape(-1, W.WIDTH).T)]
        pairs += [(getattr(layer.self_attn, f"{name}_proj"), of[name].reshape(W.WIDTH, -1).T)
                  for name in "qkv"]
        pairs += [(getattr(layer.mlp, f"{name}_proj"), of[name].T)
                  for name in ("gate", "up", "down")]
    with torch.no_grad():
        for module, value in pairs:
            assert module.weight.shape == value.shape
            module.weight.copy_(torch.from_numpy(np.ascontiguousarray(value)))
    return made


def tokenizer():
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {str(one): one for one in range(W.VOCAB)}, unk_token="1"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="1", pad_token=str(W.PAD), eos_token=str(W.END),
        padding_side="left")


class Clock(transformers.TrainerCallback):
    """The processor's clock where a step begins and ends."""

    def __init__(self):
        self.begun, self.ended = [], []

    def on_step_begin(self, *_, **__):
        self.begun.append(time.process_time())

    def on_step_end(self, *_, **__):
        self.ended.append(time.process_time())


def trained(iterations, steps):
    """Clock and the rewards' stamps of a trainer whose completions serve `iterations` updates."""
    clock, stamps = Clock(), []

    def reward(completions, **_):
        stamps.append(time.process_time())
        return [W.reward(one) for one in completions]
    cfg = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, fp16=False, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, max_steps=steps,
        per_device_train_batch_size=W.GROUP, gradient_accumulation_steps=W.PROMPTS,
        num_generations=W.GROUP, generation_batch_size=W.SAMPLES, num_iterations=iterations,
        max_completion_length=W.NEW, temperature=1.0, top_p=1.0, top_k=0, beta=0.0,
        loss_type="dapo", epsilon=W.CLIP_LOW, epsilon_high=W.CLIP_HIGH, learning_rate=W.RATE,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=W.NORM,
        gradient_checkpointing=False, shuffle_dataset=False, dataloader_pin_memory=False,
        generation_kwargs={"suppress_tokens": [W.END, W.PAD]})  # so that lengths are equal
    trl.GRPOTrainer(
        model=model(), reward_funcs=reward, args=cfg, processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_list([{"prompt": one} for one in W.texts()]),
        callbacks=[clock]).train()
    return clock, stamps


def rollout(made, repeats):
    ids = torch.from_numpy(W.prompts()).long().repeat_interleave(W.GROUP, 0)
    how = transformers.GenerationConfig(
        max_new_tokens=W.NEW, do_sample=True, temperature=1.0, top_p=1.0, top_k=0,
        pad_token_id=W.PAD, eos_token_id=None, use_cache=True)

    def sample():
        with torch.no_grad():
            found = made.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
        assert found.shape == (W.SAMPLES, W.PROMPT + W.NEW)
    return W.seconds(sample, repeats)


def main():
    torch.set_num_threads(1)
    given, made = W.arguments(), model().eval()
    tokens = torch.from_numpy(W.checked()).long()
    with torch.no_grad():
        result = {"peer": f"TRL {trl.__version__}", "check": W.mean_logprob(made(tokens).logits),
                  "versions": f"transformers {transformers.__version__}, "
                              f"torch {torch.__version__}"}
    if "rollout" in given.parts:
        result["rollout"] = rollout(made, given.repeats)
    if "update" in given.parts:
        # All steps but the first use its completions again: from begin to end it is the update.
        clock, _ = trained(given.repeats + 2, given.repeats + 2)
        result["update"] = (np.array(clock.ended) - np.array(clock.begun))[2:].tolist()
    if "step" in given.parts:
        result["step"] = W.between(trained(1, given.repeats + 2)[1])
    W.report(**result)


main()
