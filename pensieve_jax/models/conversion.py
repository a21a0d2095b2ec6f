"""Converting any loadable checkpoint to Orbax, once, so that every start after reads it sharded."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from flax import nnx

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.models import orbax_checkpoint
from pensieve_jax.models.loading import (
    CheckpointFormat,
    Progress,
    config_and_dtype,
    detect_format,
    load_model,
)
from pensieve_jax.models.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

COMPANION_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Files that a Hugging Face folder may have beside the weights and that are copied."""


def convert_checkpoint(
    source: str | Path, destination: str | Path, *, dtype: Any = None, progress: Progress | None = None
) -> None:
    """Write the checkpoint at `source` as an Orbax checkpoint that `load_model` reads.

    The folder gets config.json, the weights, and the tokenizer: copied from a folder, written anew from the
    metadata of a GGUF file. It appears whole or not at all.

    Args:
        source: anything that `load_model` takes.
        destination: a folder that doesn't exist yet, or is empty.
        dtype: as in `load_model`.
        progress: as in `load_model`; it counts what is read.

    Raises:
        InvalidArgumentError: `destination` exists and is not an empty folder, or unknown `dtype`.
        CheckpointError, UnsupportedModelError: as `load_model`.
    """
    source, destination = Path(source), Path(destination)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise InvalidArgumentError(f"destination {destination}: exists and is not an empty folder")
    model = load_model(source, dtype=dtype, progress=progress)
    config = dict(config_and_dtype(source)[0]) | {"dtype": str(model.spec.dtype)}
    config.pop("torch_dtype", None)

    partial = destination.with_name(f"{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        orbax_checkpoint.save(partial, nnx.state(model, nnx.Param))
        _write_companions(source, partial)
        if destination.exists():
            destination.rmdir()
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    logger.info("converted %s to %s", source, destination)


def _write_companions(source: Path, destination: Path) -> None:
    if detect_format(source) is CheckpointFormat.GGUF:
        load_tokenizer(source).save_pretrained(destination)
        return
    for name in COMPANION_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)
