"""A step's programs: functions that are compiled when they are first called, or ahead."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pensieve_jax.worker.program_store import ProgramStore


def signature(args: Any) -> Hashable:
    """What tells apart the programs of a function: its arguments' structure, shapes and dtypes."""
    leaves, tree = jax.tree.flatten(args)
    return tree, *((leaf.shape, leaf.dtype) for leaf in leaves)


class Program:
    """A function under `jax.jit`, and the compiled programs of it that a store has given.

    Arguments are numpy arrays, or lie where they always lie.
    """

    def __init__(
        self,
        name: str,
        function: Callable,
        store: ProgramStore | None,
        *,
        fixed: int = 0,
        donate: tuple[int, ...] = (),
        **options: Any,
    ) -> None:
        """Args:
        name: in the store.
        function: to run.
        store: where compiled programs are kept; None: nowhere.
        fixed: arguments from the first whose shapes follow from the model or from the others.
        donate: places of the arguments whose memory the results take over.
        options: of `jax.jit`, the same whenever the name is.
        """
        self._name = name
        self._fixed = fixed
        self._store = store
        self._jitted = jax.jit(function, donate_argnums=donate, **options)
        self._ready: dict[Hashable, Callable] = {}

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        varying = self._varying(args)
        filling = self._store is not None and self._store.filling
        if filling and varying not in self._ready and not self.load(*args):
            self.finish(self.lower(*args), *args)
        return self.at(varying)(*args)

    def at(self, varying: Hashable) -> Callable:
        """What runs it for arguments of a signature, those that are fixed left out."""
        return self._ready.get(varying, self._jitted)

    def load(self, *args: Any) -> bool:
        """Make the program for these arguments ready if it is in the store; whether it is ready."""
        varying = self._varying(args)
        if self._store is not None and varying not in self._ready:
            stored = self._store.load(self._name, args)
            if stored is not None:
                self._ready[varying] = stored
        return varying in self._ready

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Trace it."""
        return self._jitted.lower(*args)

    def finish(self, lowered: jax.stages.Lowered, *args: Any) -> None:
        """Compile what these arguments were lowered to, and keep it: calls find it compiled."""
        compiled = lowered.compile()
        if self._store is not None:
            self._store.save(self._name, args, compiled)
            self._ready[self._varying(args)] = compiled

    def recall[T](self, what: str, find_out: Callable[[jax.stages.Compiled], T], *args: Any) -> T:
        """What the program for these arguments tells, which needn't be compiled for it at a second start."""

        def compile_and_ask() -> T:
            return find_out(self.lower(*args).compile())

        if self._store is None:
            return compile_and_ask()
        return self._store.recall(f"{what}-{self._name}", args, compile_and_ask)

    def _varying(self, args: Sequence[Any]) -> Hashable:
        return signature(tuple(args[self._fixed :]))


@dataclass(frozen=True, slots=True)
class Call:
    """A program and arguments to make it ready for."""

    program: Program
    args: Sequence[Any]

    def load(self) -> bool:
        """See `Program.load`."""
        return self.program.load(*self.args)

    def lower(self) -> jax.stages.Lowered:
        """See `Program.lower`."""
        return self.program.lower(*self.args)

    def finish(self, lowered: jax.stages.Lowered) -> None:
        """See `Program.finish`."""
        self.program.finish(lowered, *self.args)
