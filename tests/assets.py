"""Where tests find the large files that the repository doesn't hold."""

from pathlib import Path

from pensieve_jax.assets import SMOLLM2

ASSETS_FOLDER = Path(__file__).parents[1] / ".assets"


def smollm2_path() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct, or None where it was not fetched."""
    path = ASSETS_FOLDER / SMOLLM2.path
    return path if path.is_file() else None
