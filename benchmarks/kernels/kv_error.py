"""What 8-bit keys and values change beside plain ones in float32: attention's output, a model's predictions.

    python -m benchmarks.kernels.kv_error [--out FILE]

Runs on the CPU in a minute. Attention is over normally distributed KV. The model, SmolLM2-135M-Instruct, is
given the beginnings of recorded conversations and predicts each next token of them. Both go through the code
that serves: keys and values are written into pages and read from there.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp8_pages
from pallas_kernels.kv_write import kv_write
from pallas_kernels.multi_token_attention import multi_token_attention, plan_attention
from pensieve_jax.assets import DEFAULT_FOLDER, fetch_sharegpt, fetch_smollm2
from pensieve_jax.conversations import ConversationReader, SourceConversation
from pensieve_jax.core.model_shape import KvDtype
from pensieve_jax.core.plans import Row
from pensieve_jax.models import ServableModel, load_model, load_tokenizer
from pensieve_jax.parallel import make_mesh
from pensieve_jax.records import record, replace_records
from pensieve_jax.worker.batch import BatchArrays, BatchShapes, PreviousSamples, pack
from pensieve_jax.worker.kv_pages import page_of
from pensieve_jax.worker.step_functions import StepFunctions, Weights, split_model

PAGE_TOKENS = 32
KV_DTYPE: KvDtype = "fp8_e4m3"
WINDOW_TOKENS, NUM_WINDOWS = 1024, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """A batch of equal rows.

    Attributes:
        rows: of the batch.
        q_len: query tokens of a row.
        kv_len: tokens that a row's last query attends to.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: elements of a head.
    """

    rows: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int


ATTENTION = {
    "decode_8x1024_d64": AttentionShape(rows=8, q_len=1, kv_len=1024, heads=9, kv_heads=3, head_dim=64),
    "decode_8x1024_d128": AttentionShape(rows=8, q_len=1, kv_len=1024, heads=8, kv_heads=2, head_dim=128),
    "prefill_512of1024_d64": AttentionShape(rows=1, q_len=512, kv_len=1024, heads=9, kv_heads=3, head_dim=64),
    "prefill_512of1024_d128": AttentionShape(
        rows=1, q_len=512, kv_len=1024, heads=8, kv_heads=2, head_dim=128
    ),
}


def random_inputs(shape: AttentionShape, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normally distributed queries, keys and values, as `attention_error` takes them."""
    random = np.random.default_rng(seed)
    kv = (shape.rows * shape.kv_len, shape.kv_heads, shape.head_dim)
    sizes = ((shape.rows * shape.q_len, shape.heads, shape.head_dim), kv, kv)
    q, k, v = (random.standard_normal(size, np.float32) for size in sizes)
    return q, k, v


def attention_error(shape: AttentionShape, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
    """Norm of what 8-bit pages change in attention's output, relative to the output over plain pages.

    Args:
        shape: of the batch.
        q: f32[rows * q_len, heads, head_dim].
        k: f32[rows * kv_len, kv_heads, head_dim], rows one after the other.
        v: as k.
    """
    row_pages = -(-shape.kv_len // PAGE_TOKENS)
    pages = np.arange(shape.rows * row_pages, dtype=np.int32).reshape(shape.rows, row_pages)
    where = np.arange(shape.kv_len)
    plan = plan_attention(
        q_lens=[shape.q_len] * shape.rows,
        kv_lens=[shape.kv_len] * shape.rows,
        pages=list(pages),
        max_rows=shape.rows,
        max_pages=row_pages,
        max_tokens=len(q),
    )

    def output(page_rows: int, dtype: np.dtype) -> np.ndarray:
        pool = jnp.zeros((pages.size, 2, shape.kv_heads, page_rows, shape.head_dim), dtype)
        slots = np.tile(where % PAGE_TOKENS, shape.rows).astype(np.int32)
        pool = kv_write(
            pool, jnp.asarray(k), jnp.asarray(v), pages[:, where // PAGE_TOKENS].reshape(-1), slots
        )
        return np.asarray(multi_token_attention(jnp.asarray(q), pool, plan, implementation="xla"))

    plain = output(PAGE_TOKENS, q.dtype)
    changed = output(PAGE_TOKENS + fp8_pages.SCALE_ROWS, fp8_pages.PAGE_DTYPE) - plain
    return float(np.linalg.norm(changed) / np.linalg.norm(plain))


def windows(
    conversations: Iterable[SourceConversation],
    encode: Callable[[SourceConversation], Sequence[int]],
    tokens: int,
) -> Iterator[np.ndarray]:
    """i32[tokens]: the beginning of each conversation that is so long."""
    for conversation in conversations:
        token_ids = encode(conversation)
        if len(token_ids) >= tokens:
            yield np.asarray(token_ids[:tokens], np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Of one window's tokens but the first.

    Attributes:
        log_probs: f32[n]: of the tokens that follow indeed.
        likeliest: i32[n]: the most likely token at each place.
    """

    log_probs: np.ndarray
    likeliest: np.ndarray


class Predictor:
    """A model that predicts each next token of a window, all of them in one batch."""

    def __init__(self, model: ServableModel, *, tokens: int, kv_dtype: KvDtype | None) -> None:
        """Args:
        model: whose layers attend through pages.
        tokens: of a window; a multiple of 16, as batches are padded to.
        kv_dtype: how keys and values are kept; None: in the model's dtype.
        """
        num_pages = -(-tokens // PAGE_TOKENS)
        parts, weights = split_model(model, num_shards=1)
        self._functions = StepFunctions(model.spec, parts, make_mesh(1))
        self._weights = self._functions.place(weights)
        page = page_of(model.spec, page_tokens=PAGE_TOKENS, kv_dtype=kv_dtype)
        self._pools = [jnp.zeros((num_pages, *page.shape), page.dtype)] * model.spec.num_layers
        self._shapes = BatchShapes(
            num_pages=num_pages,
            page_tokens=PAGE_TOKENS,
            max_rows=1,
            max_tokens=tokens,
            max_pages=num_pages,
            kv_dtype=kv_dtype,
        )
        self._run = jax.jit(self._predict)

    def __call__(self, token_ids: np.ndarray) -> Predictions:
        """Args:
        token_ids: i32[tokens].
        """
        pages = np.arange(self._shapes.num_pages, dtype=np.int32)
        nothing = PreviousSamples(token_ids=np.zeros(self._shapes.max_samples, np.int32), places={})
        batch, _ = pack([Row(0, token_ids, 0, pages, None)], self._shapes, nothing)
        batch = replace(batch, sample_tokens=np.arange(len(token_ids) - 1, dtype=np.int32))
        log_probs, likeliest = self._run(self._weights, self._pools, batch, token_ids[1:])
        return Predictions(log_probs=np.asarray(log_probs), likeliest=np.asarray(likeliest))

    def _predict(
        self, weights: list[Weights], pools: list[jax.Array], batch: BatchArrays, following: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        logits, _ = self._functions.whole(weights, pools, batch)
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        return jnp.take_along_axis(log_probs, following[:, None], axis=1)[:, 0], logits.argmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelError:
    """What 8-bit keys and values change in a model's predictions.

    Attributes:
        perplexity_plain: with plain keys and values.
        perplexity: with 8-bit ones.
        log_prob_change: mean magnitude, in nats, of the change of the actual next token's log probability.
        same_likeliest: share of places at which the most likely token is the same.
        predicted: number of places.
    """

    perplexity_plain: float
    perplexity: float
    log_prob_change: float
    same_likeliest: float
    predicted: int


def model_error(model: ServableModel, given: Sequence[np.ndarray]) -> ModelError:
    """Args:
    model: float32.
    given: i32[tokens] each, all of one length.
    """
    plain, changed = (
        [predict(window) for window in given]
        for predict in (Predictor(model, tokens=len(given[0]), kv_dtype=kept) for kept in (None, KV_DTYPE))
    )
    before, after = (np.concatenate([p.log_probs for p in kept]) for kept in (plain, changed))
    same = [p.likeliest == c.likeliest for p, c in zip(plain, changed, strict=True)]
    return ModelError(
        perplexity_plain=math.exp(-before.mean()),
        perplexity=math.exp(-after.mean()),
        log_prob_change=float(np.abs(after - before).mean()),
        same_likeliest=float(np.concatenate(same).mean()),
        predicted=len(before),
    )


def sharegpt_error(assets: Path) -> ModelError:
    """Of SmolLM2 over ShareGPT's first conversations that fill a window, in the model's chat template."""
    checkpoint = fetch_smollm2(assets)
    tokenizer = load_tokenizer(checkpoint)

    def encode(conversation: SourceConversation) -> Sequence[int]:
        messages = []
        for turn in conversation.turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.assistant})
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        return tokenizer.encode(text, add_special_tokens=False)

    chosen = windows(ConversationReader(fetch_sharegpt(assets)), encode, WINDOW_TOKENS)
    return model_error(load_model(checkpoint, dtype="float32"), list(islice(chosen, NUM_WINDOWS)))


def main() -> None:
    """Measure and print; put the results into a file if one is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON lines file to put the results into")
    parser.add_argument(
        "--assets", type=Path, default=DEFAULT_FOLDER, help="folder of model and conversations"
    )
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")

    def add(
        case: str, metric: str, value: float, unit: str, plain: float | None = None, **shapes: object
    ) -> None:
        print(f"{case:30s} {metric:22s} {value:9.5f} {unit:6s} plain: {plain}", flush=True)
        line = record(
            bench="kv-error",
            case=case,
            metric=metric,
            value=value,
            unit=unit,
            ceiling=plain,
            ratio=None if plain is None else plain / value,
            packages=("jax", "jaxlib", "numpy"),
            shapes={"kv_dtype": KV_DTYPE, "page_tokens": PAGE_TOKENS, **shapes},
        )
        lines.append(line)

    lines = []
    for case, shape in ATTENTION.items():
        error = attention_error(shape, *random_inputs(shape, seed=0))
        add(case, "relative_error", error, "1", **asdict(shape))
    error = sharegpt_error(args.assets)
    case = "smollm2-135m_sharegpt"
    shapes = {"windows": NUM_WINDOWS, "window_tokens": WINDOW_TOKENS, "predicted": error.predicted}
    add(case, "perplexity", error.perplexity, "1", error.perplexity_plain, **shapes)
    add(case, "log_prob_change", error.log_prob_change, "nats", **shapes)
    add(case, "same_likeliest", error.same_likeliest, "share", **shapes)
    if args.out:
        replace_records(args.out, lines)


if __name__ == "__main__":
    main()
