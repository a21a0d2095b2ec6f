"""The paper's figure 3: what a prompt costs with its history computed again, and with the history kept.

    python -m benchmarks.figures.fig03

A batch of turns, each of a few new tokens over a history: the time to all first tokens if the history is in
the cache, and if it is part of the prompt; beside it the time of generating the answers.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.figures.common import options, script, setting_of, start
from benchmarks.serving.clock import RunClock
from benchmarks.serving.compression import Tiers
from benchmarks.serving.run import Opener, ServerSettings
from benchmarks.serving.systems.base import FirstToken, System, TurnRequest

HISTORIES = (0, 512, 1024, 2048, 4096, 8192)
NEW_TOKENS, OUTPUT_TOKENS, BATCH = 200, 200, 16
QUICK = {"histories": (0, 64), "new": 16, "output": 4, "batch": 2, "rounds": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of a batch of turns, from their submission."""

    first_tokens_s: float
    """To the last one's first token."""
    answers_s: float
    """From there to the last answer's end."""


def measure(
    system: System, clock: RunClock, requests: list[TurnRequest]
) -> tuple[Times, dict[str, np.ndarray]]:
    """Times of a batch, and its answers by conversation."""
    begin_s, first_s, outputs = clock(), 0.0, {}
    for request in requests:
        system.submit(request)
    while len(outputs) < len(requests):
        for event in system.poll(1.0):
            if isinstance(event, FirstToken):
                first_s = max(first_s, event.time_s)
            else:
                outputs[event.conversation_id] = event.output
    return Times(first_tokens_s=first_s - begin_s, answers_s=clock() - first_s), outputs


def rows(
    system: System,
    clock: RunClock,
    *,
    histories: tuple,
    new: int,
    output: int,
    batch: int,
    rounds: int,
    seed: int,
    vocab: int,
) -> Iterator[dict[str, float]]:
    """One row for each history: medians over rounds."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(vocab, size=count, dtype=np.int32)

    def turn(name: int, number: int, given: np.ndarray, length: int) -> TurnRequest:
        return TurnRequest(conversation_id=f"{name}", turn=number, new=given, output_tokens=length)

    for history in histories:
        kept, again, answers = [], [], []
        for _ in range(rounds):
            system.reset()
            if history:
                measure(system, clock, [turn(i, 0, tokens(history), 1) for i in range(batch)])
                times, _ = measure(system, clock, [turn(i, 1, tokens(new), output) for i in range(batch)])
                kept.append(times.first_tokens_s)
                system.reset()
            whole = [turn(i, 0, tokens(history + new), output) for i in range(batch)]
            times, _ = measure(system, clock, whole)
            again.append(times.first_tokens_s)
            answers.append(times.answers_s)
        yield {
            "history": history,
            "kept_s": statistics.median(kept or again),
            "again_s": statistics.median(again),
            "answers_s": statistics.median(answers),
        }
    system.reset()


def server_of(given: argparse.Namespace, base: ServerSettings) -> ServerSettings:
    """The device tier as it is given: no pressure here."""
    if given.quick:
        return base
    return replace(base, tiers=Tiers(device_bytes=given.device_kv_gb * 1e9, host_bytes=0.0))


@script
def main(arguments: list[str] | None = None) -> None:
    """Run it."""
    parser = options(__doc__, model="llama-2-13b-kv10", systems=("pensieve",), rates={"default": ()})
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    setting = setting_of(given)
    sizes = {
        "histories": HISTORIES,
        "new": NEW_TOKENS,
        "output": OUTPUT_TOKENS,
        "batch": BATCH,
        "rounds": given.rounds,
    }
    sizes = QUICK if given.quick else sizes
    study, clock = start(given), RunClock()
    opener = Opener(setting.choice, server_of(given, setting.server("pensieve")))
    with opener.open("gpu-only", clock, warm=study.warm) as system:
        vocab = setting.choice.spec.vocab_size
        for row in rows(system, clock, **sizes, seed=given.seed, vocab=vocab):
            study.console.print(
                f"history {row['history']}: kept {row['kept_s']:.4f} s, computed again "
                f"{row['again_s']:.4f} s, answers {row['answers_s']:.4f} s",
                highlight=False,
            )
            shapes = {"model": setting.choice.label, "answers_s": row["answers_s"], **sizes}
            line = {
                "case": f"fig3_{setting.choice.label}_history{row['history']}",
                "metric": "prompt_s",
                "value": row["kept_s"],
                "unit": "s",
                "ceiling": row["again_s"],
                "ratio": row["again_s"] / row["kept_s"],
                "shapes": shapes | {"peer": "history computed again"},
            }
            study.keep([line])
    study.console.print(f"results: {study.path}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
