"""The instructions that a function of the graph is compiled to, and how they run.

They run over a frame, a list of registers. An instruction reads some registers, writes some, and empties those that
nobody reads after it.

A run can also be cut (`Instructions.cut`) where a call reads the host, so that what lies between can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from precast.loader.torch_device import unowned

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


class HostCall(NamedTuple):
    """A call that reads the host, cut out of a run: what is called with which arguments, and where its results belong.

    `results` were allocated in front of the call. A function that `allocates` returns others, which are copied there.
    """

    function: Function
    arguments: dict[str, Any]
    results: tuple[torch.Tensor, ...]
    allocates: bool

    def replay(self) -> None:
        """Do the call, on the memory that it was cut out with."""
        if not self.allocates:
            self.function(**self.arguments)
            return
        made = self.function(**self.arguments)
        for result, each in zip(self.results, made if isinstance(made, tuple) else (made,), strict=True):
            result.copy_(each)

    def without_owners(self) -> HostCall:
        """The same call, for a captured step: memory of the graphs' pool that it names is given to other values where
        the run lets it go."""
        arguments = {
            name: tuple(map(_unowned, value)) if isinstance(value, (tuple, list)) else _unowned(value)
            for name, value in self.arguments.items()
        }
        return self._replace(arguments=arguments, results=tuple(map(unowned, self.results)))


def _unowned(value: object) -> object:
    return unowned(value) if isinstance(value, torch.Tensor) else value


Cut = Callable[[Frame], Iterator[HostCall]]
"""An instruction whose run is cut: it stops in front of each call that reads the host, which is left to the caller."""


class Action(NamedTuple):
    """An instruction before it is known which registers die with it; `make` is told.

    So is `cut`, which an instruction has that reads the host, or may contain such calls.
    """

    label: str
    reads: Registers
    writes: Registers
    make: Callable[[Registers], Instruction]
    cut: Callable[[Registers], Cut] | None = None


class Instructions:
    """The instructions of one function, in order."""

    def __init__(self, actions: Sequence[Action], immortal: Iterable[int]) -> None:
        """Registers that are not `immortal` are emptied with the last action that touches them."""
        self._labels = [action.label for action in actions]
        alive = set(immortal)
        made: list[Instruction] = []
        self._cuts: dict[int, Cut] = {}
        for position, action in reversed(list(enumerate(actions))):
            dead = tuple({*action.reads, *action.writes} - alive)
            made.append(action.make(dead))
            if action.cut is not None:
                self._cuts[position] = action.cut(dead)
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

    @property
    def reads_host(self) -> bool:
        """Whether one of them reads the host."""
        return bool(self._cuts)

    def __len__(self) -> int:
        return len(self._instructions)

    def cut(self, frame: Frame) -> Iterator[HostCall]:
        """Run all but the calls that read the host, and stop in front of each of those.

        Its results are allocated by then, so that whoever captures this piece holds them in its memory.
        """
        for position in range(len(self)):
            yield from self.cut_at(position, frame)

    def cut_at(self, position: int, frame: Frame) -> Iterator[HostCall]:
        """The same for one of them alone."""
        if position in self._cuts:
            yield from self._cuts[position](frame)
        else:
            self._instructions[position](frame)


def op_action(
    label: str,
    function: Function,
    constants: dict[str, Any],
    reads: tuple[tuple[str, int], ...],
    writes: Registers,
    out: tuple[Out, ...],
    *,
    allocates: bool,
    reads_host: bool = False,
) -> Action:
    """Call `function` by keyword: with `constants`, and with `reads`, pairs of an argument's name and its register.

    A function that `allocates` gives a tensor for one register to write, a tuple for several, anything for none. One
    that doesn't writes into new tensors made by `out`, one for each register: they are its argument `out`, a tuple if
    they are several. `reads_host`: a run can be cut in front of the call.
    """
    target = writes[0] if len(writes) == 1 else None
    gives_out = bool(out) and not allocates

    def cut(dead: Registers) -> Cut:
        def stop(frame: Frame) -> Iterator[HostCall]:
            arguments = constants | {name: frame[register] for name, register in reads}
            made = tuple(make_tensor(frame[register]) for register, make_tensor in out)
            if gives_out:
                arguments["out"] = made[0] if target is not None else made
            yield HostCall(function, arguments, made, allocates)
            for register, tensor in zip(writes, made, strict=True):
                frame[register] = tensor
            for register in dead:
                frame[register] = None

        return stop

    def make(dead: Registers) -> Instruction:
        def run(frame: Frame) -> None:
            # The constants are copied and filled up: of the ways to call by keyword, the cheapest that was measured.
            arguments = constants.copy()
            for name, register in reads:
                arguments[name] = frame[register]
            if gives_out:
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

    read = tuple(register for _, register in reads)
    return Action(label, read, writes, make, cut if reads_host else None)


def case_action(label: str, classes: Sequence[SizeClass], actions: Sequence[Action]) -> Action:
    """Of these actions, which read and write the same, do the first in whose class the sizes are."""
    first = actions[0]

    def chosen(frame: Frame) -> int:
        for case, sizes in enumerate(classes):
            if all(low <= frame[at] and (high is None or frame[at] <= high) for at, low, high in sizes):
                return case
        raise AssertionError(f"{label}: the classes of sizes cover all sizes")

    def make(dead: Registers) -> Instruction:
        cases = [action.make(dead) for action in actions]
        return lambda frame: cases[chosen(frame)](frame)

    def cut(dead: Registers) -> Cut:
        cases = [(action.make(dead), action.cut and action.cut(dead)) for action in actions]

        def stop(frame: Frame) -> Iterator[HostCall]:
            run, stops = cases[chosen(frame)]
            if stops is None:
                run(frame)
            else:
                yield from stops(frame)

        return stop

    return Action(label, first.reads, first.writes, make, cut if any(action.cut for action in actions) else None)


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

    def entered(frame: Frame, dead: Registers) -> Frame:
        local = template.copy()
        for register, outer in moves:
            local[register] = frame[outer]
        # Emptied before the block runs: what dies in the block is from here on held by its own frame alone.
        for outer in dead:
            frame[outer] = None
        return local

    def make(dead: Registers) -> Instruction:
        kept = _kept(returns, dead)

        def run(frame: Frame) -> None:
            local = entered(frame, dead)
            instructions.run(local)
            for register, outer in kept:
                frame[outer] = local[register]

        return run

    def cut(dead: Registers) -> Cut:
        kept = _kept(returns, dead)

        def stop(frame: Frame) -> Iterator[HostCall]:
            local = entered(frame, dead)
            yield from instructions.cut(local)
            for register, outer in kept:
                frame[outer] = local[register]

        return stop

    reads, writes = tuple(outer for _, outer in moves), tuple(outer for _, outer in returns)
    return Action(label, reads, writes, make, cut if instructions.reads_host else None)


def _kept(returns: Moves, dead: Registers) -> Moves:
    """Those that are read after the call."""
    return tuple((local, outer) for local, outer in returns if outer not in dead)
