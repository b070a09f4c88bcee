"""The instructions that a function of the graph is compiled to, and how they run.

They run over a frame, a list of registers. An instruction reads some registers, writes some, and empties those that
nobody reads after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

Frame = list[Any]
Instruction = Callable[[Frame], None]
Function = Callable[..., Any]
Registers = tuple[int, ...]
Out = tuple[int, Callable[[tuple[int, ...]], Any]]
"""The register of a result's sizes, and what makes a tensor of them."""
SizeClass = Sequence[tuple[int, int, int | None]]
"""Registers of sizes, each with the least and the largest; None: any."""
Moves = tuple[tuple[int, int], ...]
"""Pairs of a register in a block's frame and one in the frame of `main`."""


class Action(NamedTuple):
    """An instruction before it is known which registers die with it; `make` is told."""

    label: str
    reads: Registers
    writes: Registers
    make: Callable[[Registers], Instruction]


class Instructions:
    """The instructions of one function, in order."""

    def __init__(self, actions: Sequence[Action], immortal: Iterable[int]) -> None:
        """Registers that are not `immortal` are emptied with the last action that touches them."""
        self._labels = [action.label for action in actions]
        alive = set(immortal)
        made: list[Instruction] = []
        for action in reversed(actions):
            made.append(action.make(tuple({*action.reads, *action.writes} - alive)))
            alive.update(action.reads)
        self._instructions = made[::-1]

    def run(self, frame: Frame) -> None:
        """Run all of them; an error carries a note that says which one it comes from."""
        position = 0
        try:
            for instruction in self._instructions:
                instruction(frame)
                position += 1
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            error.add_note(f"in {self._labels[position]}")
            raise


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
    target = writes[0] if len(writes) == 1 else None

    def make(dead: Registers) -> Instruction:
        def run(frame: Frame) -> None:
            # The constants are copied and filled up: of the ways to call by keyword, the cheapest that was measured.
            arguments = constants.copy()
            for name, register in reads:
                arguments[name] = frame[register]
            if out:
                made = [make_tensor(frame[register]) for register, make_tensor in out]
                arguments["out"] = made[0] if target is not None else tuple(made)
                function(**arguments)
                for register, tensor in zip(writes, made, strict=True):
                    frame[register] = tensor
            elif target is not None:
                frame[target] = function(**arguments)
            else:
                results = function(**arguments)
                for register, result in zip(writes, results if writes else (), strict=True):
                    frame[register] = result
            for register in dead:
                frame[register] = None

        return run

    return Action(label, tuple(register for _, register in reads), writes, make)


def case_action(label: str, classes: Sequence[SizeClass], actions: Sequence[Action]) -> Action:
    """Of these actions, which read and write the same, do the first in whose class the sizes are."""
    first = actions[0]

    def make(dead: Registers) -> Instruction:
        cases = [(sizes, action.make(dead)) for sizes, action in zip(classes, actions, strict=True)]

        def run(frame: Frame) -> None:
            for sizes, chosen in cases:
                if all(low <= frame[at] and (high is None or frame[at] <= high) for at, low, high in sizes):
                    return chosen(frame)
            raise AssertionError(f"{label}: the classes of sizes cover all sizes")

        return run

    return Action(label, first.reads, first.writes, make)


def list_action(label: str, reads: Registers, target: int) -> Action:
    """Put the values of `reads` into a list."""

    def make(dead: Registers) -> Instruction:
        def run(frame: Frame) -> None:
            frame[target] = [frame[register] for register in reads]
            for register in dead:
                frame[register] = None

        return run

    return Action(label, reads, (target,), make)


def call_action(label: str, instructions: Instructions, template: Frame, moves: Moves, returns: Moves) -> Action:
    """Run `instructions` over a copy of `template` into which `moves` were made; `returns` come back out of it."""

    def make(dead: Registers) -> Instruction:
        unused = set(dead)
        kept = tuple((local, outer) for local, outer in returns if outer not in unused)

        def run(frame: Frame) -> None:
            local = template.copy()
            for register, outer in moves:
                local[register] = frame[outer]
            # Emptied before the block runs: what dies in the block is from here on held by its own frame alone.
            for outer in dead:
                frame[outer] = None
            instructions.run(local)
            for register, outer in kept:
                frame[outer] = local[register]

        return run

    return Action(label, tuple(outer for _, outer in moves), tuple(outer for _, outer in returns), make)
