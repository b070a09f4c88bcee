"""Steps over a frame: what a compiled function consists of, and how it runs.

A frame is a list of registers. A step reads some, writes some, and empties those that nobody reads after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

Frame = list[Any]
Step = Callable[[Frame], None]
Function = Callable[..., Any]
Registers = tuple[int, ...]
Out = tuple[int, Callable[[tuple[int, ...]], Any]]
"""The register of a result's sizes, and what makes a tensor of them."""
Ranges = Sequence[tuple[int, int, int | None]]
"""Registers of sizes, each with the least and the largest; None: any."""
Moves = tuple[tuple[int, int], ...]
"""Pairs of a register in a block's frame and one in the frame of `main`."""


class Action(NamedTuple):
    """A step before it is known which registers die with it; `make` is told."""

    label: str
    reads: Registers
    writes: Registers
    make: Callable[[Registers], Step]


class Steps:
    """The steps of one function, in order."""

    def __init__(self, actions: Sequence[Action], immortal: Iterable[int]) -> None:
        """Registers that are not `immortal` are emptied with the last action that touches them."""
        self._labels = [action.label for action in actions]
        self._steps = _finish(actions, immortal)

    def run(self, frame: Frame) -> None:
        """Run all steps; an error carries a note that says which one it comes from."""
        position = 0
        try:
            for step in self._steps:
                step(frame)
                position += 1
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            error.add_note(f"in {self._labels[position]}")
            raise


def _finish(actions: Sequence[Action], immortal: Iterable[int]) -> list[Step]:
    alive = set(immortal)
    steps: list[Step] = []
    for action in reversed(actions):
        steps.append(action.make(tuple({*action.reads, *action.writes} - alive)))
        alive.update(action.reads)
    return steps[::-1]


def op_action(
    label: str,
    function: Function,
    constants: dict[str, Any],
    reads: tuple[tuple[str, int], ...],
    writes: Registers,
    out: tuple[Out, ...] = (),
) -> Action:
    """Call `function` by keyword: with `constants`, and with `reads`, pairs of an argument's name and its register.

    The function gives a tensor for one register to write, a tuple for several, anything for none. If there is `out`,
    it writes into new tensors instead, one for each register, which it is given as `out`, a tuple if they are several.
    """

    # The constants are copied and filled up: of the ways to call by keyword, the cheapest that was measured.
    def make_one(dead: Registers) -> Step:
        (target,) = writes

        def step(frame: Frame) -> None:
            arguments = constants.copy()
            for name, register in reads:
                arguments[name] = frame[register]
            frame[target] = function(**arguments)
            for register in dead:
                frame[register] = None

        return step

    def make_any(dead: Registers) -> Step:
        def step(frame: Frame) -> None:
            arguments = constants.copy()
            for name, register in reads:
                arguments[name] = frame[register]
            results = function(**arguments)
            for target, result in zip(writes, results if writes else (), strict=True):
                frame[target] = result
            for register in dead:
                frame[register] = None

        return step

    def make_into(dead: Registers) -> Step:
        def step(frame: Frame) -> None:
            arguments = constants.copy()
            for name, register in reads:
                arguments[name] = frame[register]
            made = [make(frame[register]) for register, make in out]
            arguments["out"] = made[0] if len(made) == 1 else tuple(made)
            function(**arguments)
            for target, result in zip(writes, made, strict=True):
                frame[target] = result
            for register in dead:
                frame[register] = None

        return step

    make = make_into if out else make_one if len(writes) == 1 else make_any
    return Action(label, tuple(register for _, register in reads), writes, make)


def case_action(label: str, ranges: Sequence[Ranges], actions: Sequence[Action]) -> Action:
    """Of these actions, which read and write the same, do the first within whose ranges the sizes lie."""
    first = actions[0]

    def make(dead: Registers) -> Step:
        cases = [(sizes, action.make(dead)) for sizes, action in zip(ranges, actions, strict=True)]

        def step(frame: Frame) -> None:
            for sizes, chosen in cases:
                if all(low <= frame[at] and (high is None or frame[at] <= high) for at, low, high in sizes):
                    return chosen(frame)
            raise AssertionError(f"{label}: the classes of sizes cover all sizes")

        return step

    return Action(label, first.reads, first.writes, make)


def list_action(label: str, reads: Registers, target: int) -> Action:
    """Put the values of `reads` into a list."""

    def make(dead: Registers) -> Step:
        def step(frame: Frame) -> None:
            frame[target] = [frame[register] for register in reads]
            for register in dead:
                frame[register] = None

        return step

    return Action(label, reads, (target,), make)


def call_action(label: str, steps: Steps, template: Frame, moves: Moves, returns: Moves) -> Action:
    """Run `steps` over a copy of `template` into which `moves` were made; `returns` come back out of it."""

    def make(dead: Registers) -> Step:
        kept = tuple((local, outer) for local, outer in returns if outer not in dead)

        def step(frame: Frame) -> None:
            local = template.copy()
            for register, outer in moves:
                local[register] = frame[outer]
            # Emptied before the block runs: what dies in the block is from here on held by its own frame alone.
            for outer in dead:
                frame[outer] = None
            steps.run(local)
            for register, outer in kept:
                frame[outer] = local[register]

        return step

    return Action(label, tuple(outer for _, outer in moves), tuple(outer for _, outer in returns), make)
