"""Reading config.json so that no field that changes the mathematics is passed over.

A family asks for the fields that it computes with. What is left at the end must be known to be harmless
or be off (None, False, 0, empty); anything else is refused by name, since a model that ignores, say, a soft
cap on its logits answers fluently and wrongly.
"""

from collections.abc import Mapping
from typing import Any

from pensieve_jax.core.errors import CheckpointError, UnsupportedModelError

HARMLESS_FIELDS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dropout",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "hidden_dropout",
        "id2label",
        "init_std",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "layerdrop",
        "length_penalty",
        "max_length",
        "min_length",
        "model_type",
        "name_or_path",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "use_return_dict",
    }
)
"""Fields about training, generation defaults or bookkeeping. `pretraining_tp` only orders a sum."""

_REQUIRED = object()


class ConfigFields:
    """The fields of one config.json, ticked off as they are read.

    Every reader raises `CheckpointError` where a field is missing or has another type than it must have.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._read: set[str] = set()

    def value(self, name: str, default: Any = _REQUIRED) -> Any:
        """The field as it is; `default` where it is absent."""
        self._read.add(name)
        if name in self._config:
            return self._config[name]
        if default is _REQUIRED:
            raise CheckpointError(f"config.json: field {name!r} is missing")
        return default

    def integer(self, name: str, default: Any = _REQUIRED) -> int:
        """A positive whole number."""
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {name}={value!r}, expected a positive integer")
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """A positive whole number, or None where the field is absent or null."""
        return None if self.value(name, default) is None else self.integer(name, default)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A positive number."""
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(f"config.json: {name}={value!r}, expected a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; null counts as absent."""
        value = self.value(name, default)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name}={value!r}, expected true or false")
        return value

    def choice(self, name: str, choices: Mapping[str, Any], default: str) -> str:
        """One of the names that are computed exactly.

        Raises:
            UnsupportedModelError: another name.
        """
        value = self.value(name, default)
        if value not in choices:
            raise UnsupportedModelError(
                f"config.json: {name}={value!r} is not supported, expected one of {sorted(choices)}"
            )
        return value

    def refuse_rest(self) -> None:
        """Check that no field that may matter was left unread.

        Raises:
            UnsupportedModelError: one was; the text names it and its value.
        """
        for name, value in self._config.items():
            # A leading underscore marks bookkeeping of transformers (`_name_or_path`).
            known = name in self._read or name in HARMLESS_FIELDS or name.startswith("_")
            if not known and value:
                raise UnsupportedModelError(
                    f"config.json: {name}={value!r} is not supported: it may change what the model computes"
                )


def refuse(name: str, value: Any, why: str = "") -> UnsupportedModelError:
    """The error for a field whose value no model here computes."""
    return UnsupportedModelError(f"config.json: {name}={value!r} is not supported{why and f': {why}'}")
