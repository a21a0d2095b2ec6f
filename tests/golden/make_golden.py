"""Write the golden files in this folder with PyTorch and transformers, the reference for the models here.

    python tests/golden/make_golden.py [SmolLM2-135M-Instruct.Q4_1.gguf]

Needs torch, transformers, accelerate and gguf; the tests that read the files don't need torch. Each small
model is a checkpoint folder with `golden.npz`: `token_ids` i64[T] and `logits` f32[T, vocab]. With the path
of the GGUF file, logits, greedy continuations and token ids of SmolLM2 are written too.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parent
NUM_TOKENS = 40
NUM_GREEDY_TOKENS = 64
TOP_K = 20

_SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = {
    **_SIZES,
    "model_type": "llama",
    "intermediate_size": 64,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_OPT = {**_SIZES, "model_type": "opt", "ffn_dim": 48, "max_position_embeddings": 64}
_QWEN3 = {**_LLAMA, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16}

SMALL_MODELS: dict[str, dict[str, Any]] = {
    "opt": _OPT,
    "opt-350m": {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "opt-plain": {
        **_OPT,
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "_remove_final_layer_norm": True,
        "tie_word_embeddings": False,
    },
    "llama": _LLAMA,
    "llama-biases": {**_LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "llama3-tied": {
        **_LLAMA,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama-linear": {**_LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama-yarn": {
        **_LLAMA,
        "head_dim": 16,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "mistral": {**_LLAMA, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 7},
    "qwen2": {**_LLAMA, "model_type": "qwen2", "num_key_value_heads": 2},
    "qwen2-windows": {
        **_LLAMA,
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen3": _QWEN3,
    "qwen3-biases": {**_QWEN3, "attention_bias": True, "tie_word_embeddings": True},
}

PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Name three animals that live in the desert and say how they find water.",
    "def fibonacci(n): please finish this Python function.",
    "Translate 'good morning, my friend' into Spanish.",
    "I have a headache. What could help me?",
    "Tell me a story about a robot that learns to cook.",
    "What is the difference between a list and a tuple in Python?",
    "Give me a recipe for pancakes with bananas.",
)

TEXTS = (
    "Hello, world! It's a test; we'll see.",
    "The year 2024 has 366 days, 12 months and 52.3 weeks.",
    "def f(x):\n    return x**2 + 0x1F  # comment\n\n\nclass A:\n\tpass\n",
    "Grüße aus München, naïve café, 東京タワー, Привет мир, שלום, 😀👩‍👩‍👧",
    "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n",
    "trailing spaces   \n\n  and\ttabs \r\n windows",
    "a<|im_end|>b <|endoftext|> c",
    "¼ ½ ² x² 123,456.789 €5",
    "x =  1\n\t2   3",
    "",
    " leading",
)


def small_golden(name: str, settings: dict[str, Any]) -> None:
    """A random small model, its checkpoint and its logits."""
    torch.manual_seed(sum(map(ord, name)))
    settings = dict(settings)
    model_type = settings.pop("model_type")
    config = AutoConfig.for_model(model_type, **copy.deepcopy(settings))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Far from zero and one, so that no missing bias or scale goes unseen.
            noise = torch.randn_like(parameter)
            is_scale = "norm" in parameter_name and parameter_name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if is_scale else 0.25 * noise)
        token_ids = torch.randint(0, config.vocab_size, (1, NUM_TOKENS))
        logits = model(token_ids).logits[0]
    folder = FOLDER / name
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    # As published checkpoints are: with the settings, not with what this version makes of them.
    if "rope_scaling" in settings:
        saved = json.loads((folder / "config.json").read_text())
        saved.pop("rope_parameters", None)
        saved |= {key: settings[key] for key in ("rope_scaling", "rope_theta") if key in settings}
        (folder / "config.json").write_text(json.dumps(saved, indent=2) + "\n")
    np.savez_compressed(folder / "golden.npz", token_ids=token_ids[0].numpy(), logits=logits.numpy())


def smollm2_tokenizer(file: Path) -> Any:
    """The tokenizer as the file defines it.

    transformers builds it without the split of digits that `tokenizer.ggml.pre = smollm` stands for (and that
    the published tokenizer.json has), so whitespace before a digit would come out wrong.
    """
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


def smollm2_golden(file: Path) -> None:
    """Logits, greedy continuations and token ids of the real small model, in float32."""
    tokenizer = smollm2_tokenizer(file)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None  # Continue to the full length, whatever comes.
    continuations = []
    for prompt in PROMPTS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, return_tensors="pt").input_ids
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_GREEDY_TOKENS,
            pad_token_id=0,
        )
        new = output[0, ids.shape[1] :].tolist()
        assert len(new) == NUM_GREEDY_TOKENS
        continuations.append({"prompt": prompt, "prompt_ids": ids[0].tolist(), "output_ids": new})
    _write_json("smollm2-greedy.json", continuations)
    with torch.no_grad():
        prompt_ids = torch.tensor([continuations[0]["prompt_ids"]])
        logits = model(prompt_ids).logits[0]
    top = logits.topk(TOP_K, dim=-1)
    np.savez_compressed(
        FOLDER / "smollm2-logits.npz",
        token_ids=prompt_ids[0].numpy(),
        last_logits=logits[-1].numpy(),
        top_ids=top.indices.numpy().astype(np.int32),
        top_logits=top.values.numpy(),
    )
    _write_json(
        "smollm2-tokens.json",
        [{"text": text, "ids": tokenizer(text, add_special_tokens=True).input_ids} for text in TEXTS],
    )


def _write_json(name: str, value: Any) -> None:
    (FOLDER / name).write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Write everything, and the versions it was made with."""
    for name, settings in SMALL_MODELS.items():
        small_golden(name, settings)
    if len(sys.argv) > 1:
        smollm2_golden(Path(sys.argv[1]))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    _write_json("versions.json", versions)


if __name__ == "__main__":
    main()
