"""Makes a workload from settings: reads or draws conversations, gives them tokens and times."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.workloads.running_start import with_running_start
from benchmarks.workloads.tokens import Progress, draw_tokens, encode
from benchmarks.workloads.workload import TokenConversation, Workload
from pensieve_jax.assets import DEFAULT_FOLDER, fetch_sharegpt
from pensieve_jax.conversations import ConversationReader, SourceConversation, UltraChatReader
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.simulator import (
    SimConversation,
    read_workload,
    sample_conversations,
    with_poisson_arrivals,
    with_time_scale,
)
from pensieve_jax.simulator.synthetic import SyntheticWorkload
from pensieve_jax.simulator.workload import MAX_CONTEXT_TOKENS

ROOT = Path(__file__).parents[2]
TEXTS: dict[str, Callable[[Path], Sequence[SourceConversation] | ConversationReader | UltraChatReader]] = {
    "sharegpt": ConversationReader,
    "ultrachat": UltraChatReader,
}
"""Sources that hold texts, so that a tokenizer can be used."""
TRACES = ("mooncake", "ragpulse", "azure", "jsonl")
"""Sources that hold lengths and recorded times."""
SOURCES = (*TEXTS, *TRACES, "synthetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """What a workload is made from. Equal settings and equal files give equal workloads, token for token.

    Raises:
        InvalidArgumentError: a value is out of range.
    """

    source: str = "sharegpt"
    """One of `SOURCES`."""
    path: Path | None = None
    """The file of the source. None: ShareGPT is fetched; synthetic conversations need none."""
    conversations: int = 200
    """How many begin. From a file they are drawn at random, none twice before all were drawn once."""
    requests_per_s: float | None = 1.0
    """Turns per second on average, once as many conversations run as ever will; they begin as a Poisson
    process. None: the recorded times of a trace."""
    think_time_s: float = 60.0
    """Mean of the exponentially distributed time between an answer and the next turn (paper, section 6.1)."""
    speed: float = 1.0
    """How fast recorded times run."""
    max_context_tokens: int = MAX_CONTEXT_TOKENS
    """Longer conversations are cut (paper, section 6.1)."""
    vocab_size: int = 32_000
    """Of drawn token ids, where no tokenizer is given."""
    head_start_s: float = 0.0
    """How long conversations have been coming before the start; see `running_start`."""
    answer_s_per_token: float = 0.03
    """About how long an answer took before the start, for each of its tokens."""
    synthetic: SyntheticWorkload | None = None
    """Distributions of synthetic conversations; its `conversations` gives way to the one here."""
    seed: int = 0
    """Of the choice, the ids and the times."""

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise InvalidArgumentError(f"{name}: got {getattr(self, name)!r}, expected {expected}")

        check(self.source in SOURCES, "source", f"one of {', '.join(SOURCES)}")
        needs_path = self.source not in ("sharegpt", "synthetic")
        check(self.path is not None or not needs_path, "path", f"the file of {self.source}")
        check(self.conversations >= 1, "conversations", "at least 1")
        check(self.requests_per_s is None or self.requests_per_s > 0, "requests_per_s", "more than 0")
        recorded = self.source in TRACES
        check(self.requests_per_s is not None or recorded, "requests_per_s", "a rate: no times are recorded")
        check(self.think_time_s >= 0, "think_time_s", "at least 0")
        check(self.speed > 0, "speed", "more than 0")
        check(self.max_context_tokens >= 2, "max_context_tokens", "at least 2")
        check(self.vocab_size >= 2, "vocab_size", "at least 2")
        check(self.head_start_s >= 0, "head_start_s", "at least 0")
        check(self.answer_s_per_token >= 0, "answer_s_per_token", "at least 0")

    def as_json(self) -> dict[str, Any]:
        """Plain values; of the file only its name."""
        values = asdict(self)
        values["path"] = None if self.path is None else self.path.name
        return values


def make_workload(
    settings: WorkloadSettings,
    tokenizer: Any | None = None,
    *,
    tokens: Sequence[TokenConversation] | None = None,
    progress: Progress | None = None,
) -> Workload:
    """Make a workload.

    Args:
        settings: what to make it from.
        tokenizer: of `transformers`, for sources that hold texts; None draws ids of about the right counts.
        tokens: what `tokenise` gave for settings that differ in times alone; None tokenises now.
        progress: is told how many conversations of how many are tokenised.

    Raises:
        InvalidArgumentError: the file is not of its source's form or holds nothing usable.
        AssetError: ShareGPT can't be fetched.
        OSError: the file can't be read.
    """
    if tokens is None:
        tokens = tokenise(settings, tokenizer, progress)
    timed = _timed(tokens, settings)
    begun = with_running_start(
        timed, head_start_s=settings.head_start_s, answer_s_per_token=settings.answer_s_per_token
    )
    if not begun:
        raise InvalidArgumentError(
            f"head_start_s: got {settings.head_start_s:g}, expected less than the conversations last"
        )
    about = settings.as_json() | {"tokens": "drawn" if tokenizer is None else _name(tokenizer)}
    return Workload(conversations=tuple(begun), settings=about)


def tokenise(
    settings: WorkloadSettings, tokenizer: Any | None = None, progress: Progress | None = None
) -> list[TokenConversation]:
    """The conversations of a workload as tokens, without times. Arguments and errors as of `make_workload`.

    Of the settings, those of times don't matter.
    """
    if settings.source in TEXTS and tokenizer is not None:
        texts = sample_conversations(_texts(settings), settings.conversations, settings.seed)
        tokens = encode(texts, tokenizer, settings.max_context_tokens, progress)
    else:
        tokens = draw_tokens(
            _lengths(settings),
            vocab_size=settings.vocab_size,
            max_context_tokens=settings.max_context_tokens,
            seed=settings.seed,
        )
    if not tokens:
        raise InvalidArgumentError(
            f"max_context_tokens: got {settings.max_context_tokens}, expected enough for a conversation"
        )
    return tokens


def _texts(settings: WorkloadSettings) -> list[SourceConversation]:
    path = settings.path or fetch_sharegpt(ROOT / DEFAULT_FOLDER)
    texts = list(TEXTS[settings.source](path))
    if not texts:
        raise InvalidArgumentError(f"{path.name}: got no conversation, expected at least one")
    return texts


def _lengths(settings: WorkloadSettings) -> list[SimConversation]:
    if settings.source == "synthetic":
        distributions = settings.synthetic or SyntheticWorkload()
        values = {name: getattr(distributions, name) for name in distributions.__dataclass_fields__}
        return SyntheticWorkload(**values | {"conversations": settings.conversations}).draw(settings.seed)
    path = settings.path or fetch_sharegpt(ROOT / DEFAULT_FOLDER)
    known = read_workload(path, settings.source)
    if settings.requests_per_s is None:  # recorded times mean something only together
        return known[: settings.conversations]
    return sample_conversations(known, settings.conversations, settings.seed)


def _timed(tokens: Sequence[TokenConversation], settings: WorkloadSettings) -> list[TokenConversation]:
    shapes = [conversation.shape for conversation in tokens]
    if settings.requests_per_s is None:
        timed = with_time_scale(shapes, settings.speed)
    else:
        timed = with_poisson_arrivals(
            shapes,
            requests_per_s=settings.requests_per_s,
            think_time_s=settings.think_time_s,
            seed=settings.seed,
        )
    return [
        TokenConversation(shape=shape, inputs=conversation.inputs, answers=conversation.answers)
        for shape, conversation in zip(timed, tokens, strict=True)
    ]


def _name(tokenizer: Any) -> str:
    """Kind and size of the vocabulary: what ids depend on, as far as a tokenizer tells."""
    return f"{type(tokenizer).__name__} of {len(tokenizer)} tokens"
