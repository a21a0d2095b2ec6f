"""The cases of `pensieve bench step`: which rows a step has. The names are those of the project's bars."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Kind(StrEnum):
    """What of a case is measured."""

    STEP = "step"
    """Its steps, back to back on the device."""
    HIT = "hit"
    """Steps whose rows' past is on the device, beside the same without a host tier."""
    SWAP_IN = "swap-in"
    """One step whose rows' past comes from host memory."""
    SWAP_OUT = "swap-out"
    """Steps that also copy pages to host memory, beside steps that don't."""
    MIXED = "mixed"
    """Decode steps that also compute pieces of a prompt, beside both alone."""
    HOST = "host"
    """Steps as the engine dispatches them, beside the same back to back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Rows that are all alike.

    Attributes:
        name: of the case.
        kind: what is measured.
        rows: how many.
        new_tokens: query tokens of each row.
        past_tokens: tokens of each row whose KV is there already.
        prompt_tokens: of the prompt that is computed beside the rows, in pieces.
    """

    name: str
    kind: Kind = Kind.STEP
    rows: int
    new_tokens: int
    past_tokens: int
    prompt_tokens: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether every row has one new token."""
        return self.new_tokens == 1

    @property
    def tokens(self) -> int:
        """Query tokens of all rows."""
        return self.rows * self.new_tokens

    def scaled(self, scale: int) -> "Case":
        """The same case for a small model: fewer and shorter rows under the same name."""
        if scale == 1:
            return self
        return replace(
            self,
            rows=max(1, self.rows // scale),
            new_tokens=1 if self.is_decode else max(2, self.new_tokens // scale),
            past_tokens=self.past_tokens // scale,
            prompt_tokens=self.prompt_tokens // scale,
        )


def decode_case(batch: int, context: int) -> Case:
    """`batch` rows that each attend to `context` tokens, the new one included."""
    return Case(name=f"decode_b{batch}_ctx{context}", rows=batch, new_tokens=1, past_tokens=context - 1)


def prefill_case(rows: int, tokens: int) -> Case:
    """`rows` prompts of `tokens` without a past."""
    return Case(name=f"prefill_{rows}x{tokens}", rows=rows, new_tokens=tokens, past_tokens=0)


CASES: Sequence[Case] = (
    decode_case(64, 1024),
    decode_case(1, 1024),
    decode_case(16, 1024),
    decode_case(128, 1024),
    decode_case(256, 512),
    prefill_case(8, 4096),
    prefill_case(16, 1024),
    prefill_case(1, 8192),
    Case(
        name="mixed_64dec_2000",
        kind=Kind.MIXED,
        rows=64,
        new_tokens=1,
        past_tokens=1023,
        prompt_tokens=2000,
    ),
    Case(name="hit_b8_200_over_8000", kind=Kind.HIT, rows=8, new_tokens=200, past_tokens=8000),
    Case(name="swapin_b8_200_over_8000", kind=Kind.SWAP_IN, rows=8, new_tokens=200, past_tokens=8000),
    Case(name="swapout_under_decode_b64", kind=Kind.SWAP_OUT, rows=64, new_tokens=1, past_tokens=1023),
    Case(name="idle_between_steps_b64", kind=Kind.HOST, rows=64, new_tokens=1, past_tokens=1023),
)
