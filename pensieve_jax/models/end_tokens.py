"""Which tokens end an answer, as the checkpoint says it."""

from pathlib import Path
from typing import Any

from pensieve_jax.models.safetensors_source import read_json


def end_token_ids(path: str | Path, tokenizer: Any | None) -> tuple[int, ...]:
    """Token ids that end an answer.

    Instruction-tuned checkpoints often name several in generation_config.json, more than the tokenizer
    knows (Llama 3: end of text and end of turn).

    Args:
        path: a checkpoint's folder or GGUF file.
        tokenizer: its tokenizer; its end token counts too.
    """
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        if file.is_file():
            value = read_json(file).get("eos_token_id")
            found.extend(value if isinstance(value, list) else [] if value is None else [value])
    eos = getattr(tokenizer, "eos_token_id", None)
    if eos is not None:
        found.append(eos)
    return tuple(sorted(set(found)))
