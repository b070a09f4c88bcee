"""How the weight stream goes through its matrices, as `stream.cu` takes it: tiles, pieces, and shared memory."""

from __future__ import annotations

from typing import NamedTuple

MAX_ROWS = 8
"""Rows of the input that a weight passes for: the columns of one mma. cuBLAS is as fast from about 16 on."""
TILE = 16
"""Rows of the weight that are multiplied together."""
STEP = 32
"""The input's width is a multiple of it, for weights of 16 bits."""
_PAD, _FLOAT32 = 16, 4
"""Bytes behind a piece of a row of the weight, and of an input's scale."""
_NUM_SMS = 132
"""Streaming multiprocessors of H100 SXM, H200 and GH200. On a GPU with fewer the grid takes a second round."""
_SHARED_BYTES = 227 << 10
"""Shared memory that a block may have."""
_LEAST_STAGES, _MOST_STAGES, _MOST_X_SLOTS = 2, 12, 8


class Way(NamedTuple):
    """How the weight stream goes for some numbers of rows; the figures are the fastest that were measured.

    `piece`: elements of a row that are copied at once. An x of one or two pieces is kept in shared memory. A longer one
    is kept if it takes no more than `kept_bytes` and a block has `kept_from` tiles at least; where x is prepared
    (`Stored.prepares_x`) the number of tiles doesn't count. What isn't kept is read again for every few tiles.
    `in_flight`: bytes of the weight, with those behind pieces, that a block asks memory for at a time; if a stage of
    each team is more, it is that. `room` are bytes of shared memory that are left to the kernels beside.
    """

    piece: int
    kept_bytes: int
    kept_from: int = 0
    in_flight: int = 72 << 10
    room: int = 0


class Stored(NamedTuple):
    """How the weight and x are stored: bits of the one's elements and bytes of the other's.

    `step`: inputs that a warp multiplies at a time. `group`: neighbours in a row that have a scale of
    `scale_bytes`, if some have; each of the weight's rows has such scales of its own, unless tiles `share` them. With
    `points` groups have these, too, of as many bits as a weight. `summed`: neighbours of x of which the kernel keeps
    sums, if it does.
    """

    bits: int = 16
    x_bytes: int = 2
    step: int = STEP
    group: int | None = None
    scale_bytes: int = _FLOAT32
    share: bool = False
    points: bool = False
    summed: int | None = None

    @property
    def warps(self) -> int:
        """That multiply: more where more instructions make operands of as many bytes."""
        return 16 if self.bits == 4 else 8

    @property
    def teams(self) -> int:
        """Of these warps, each with tiles of its own: two where a tile's bytes are few, and it is soon done."""
        return 1 if self.bits == 16 else 2

    @property
    def prepares_x(self) -> bool:
        """Whether the warps that multiply first put x into an order, or sum it. An x that is kept they also bring."""
        return self.bits == 4 or self.summed is not None

    def threads(self, *, keeps_x: bool) -> int:
        """Of a block: warps that multiply, those that bring the weight, and one that brings x if these don't."""
        return 32 * (self.warps + self.teams + (not keeps_x))

    @property
    def head_bytes(self) -> int:
        """What lies in front of the ring: barriers, and sums of the warps, in four bits of two tiles."""
        return 16768 if self.bits == 4 else 4480

    @property
    def most_tiles_a_pass(self) -> int:
        """As many as a thread has registers for, which are fewer where there are more threads."""
        return 4 if self.bits == 4 else 8

    def x_pitch(self, width: int) -> int:
        """Bytes from a row of x, or of a piece of it, to the next one in shared memory."""
        sums = -(-width // self.summed * _FLOAT32 // 128) * 128 if self.summed else 0
        return width * self.x_bytes + self.x_bytes * 128 // self.bits + sums

    def tile_scales(self, inputs: int) -> int:
        """Bytes of a tile's scales of groups, and of points."""
        if self.group is None:
            return 0
        groups, rows = inputs // self.group, 1 if self.share else TILE
        pad = _PAD if self.scale_bytes == 1 else 0
        return rows * (groups * self.scale_bytes + pad) + (groups * TILE * self.bits // 8 if self.points else 0)

    def x_scales(self, inputs: int) -> int:
        """Bytes of the scales of groups of x, which it has if it is stored in few bits as well."""
        return MAX_ROWS * (inputs // self.group) * _FLOAT32 if self.group is not None and self.x_bytes == 1 else 0


SIXTEEN_BITS = Stored()


class Plan(NamedTuple):
    """What `stream.cu` takes of it, in this order; then how many tiles of a team have their scales of groups in shared
    memory, how many tiles share one reading of x, whether x is kept in one piece, how many blocks there are, their
    threads, and the shared memory that a block fills.

    `stages` are a team's, as those of them `in_flight`.
    """

    tiles_each: int
    tiles_more: int
    piece: int
    pieces: int
    stages: int
    in_flight: int
    x_slots: int
    scale_slots: int
    tiles_a_pass: int
    keeps_x: bool
    grid: int
    threads: int
    shared_bytes: int

    @property
    def args(self) -> tuple[int, ...]:
        """The kernel's."""
        return self[:7]


def plan_of(
    way: Way, rows: int, outputs: int, inputs: int, *,
    is_gated: bool, blocks: int = _NUM_SMS, stored: Stored = SIXTEEN_BITS,
) -> Plan:  # fmt: skip
    """The plan for up to so many rows, over as many blocks at most, of a layer that fits."""
    found = plan_that_fits(way, rows, outputs, inputs, is_gated=is_gated, blocks=blocks, stored=stored)
    assert found is not None, f"{way} has no room for {rows} rows of {inputs} inputs and a stage of {stored}"
    return found


def plan_that_fits(
    way: Way, rows: int, outputs: int, inputs: int, *,
    is_gated: bool = False, blocks: int = _NUM_SMS, stored: Stored = SIXTEEN_BITS,
) -> Plan | None:  # fmt: skip
    """The same; None if x, scales and two stages, or all that there are, don't fit into shared memory: with one alone
    nothing would be copied while it is multiplied."""
    num_tiles = -(-outputs // (1 + is_gated) // (TILE // (1 + is_gated)))
    grid = min(blocks, num_tiles)
    each, more = divmod(num_tiles, grid)
    pieces = -(-inputs // way.piece)
    turn = stored.step * stored.warps // stored.teams
    piece = way.piece if pieces > 1 else -(-inputs // turn) * turn
    most = each + (more > 0)
    x_pitch, whole = stored.x_pitch(piece), stored.x_pitch(-(-inputs // turn) * turn)
    fits = most >= way.kept_from and pieces <= _MOST_X_SLOTS and rows * pieces * x_pitch <= way.kept_bytes
    keeps_x = stored.prepares_x and (pieces <= 2 or rows * whole <= way.kept_bytes)
    x_slots = 1 if keeps_x else pieces if pieces <= 2 or fits else 2
    assert keeps_x or not (stored.prepares_x and x_slots == pieces), "a piece that stays would be prepared each time"
    is_read_once = keeps_x or x_slots == pieces
    tiles = stored.teams if is_read_once else max(stored.teams, 2 if most <= 2 else stored.most_tiles_a_pass)
    around = stored.head_bytes + rows * x_slots * (whole if keeps_x else x_pitch) + stored.x_scales(inputs)
    stage, tile_scales = TILE * (piece * stored.bits // 8 + _PAD), stored.tile_scales(inputs)
    own, own_most = tiles // stored.teams, -(-most // stored.teams)
    all_stages = min(_MOST_STAGES // stored.teams, own_most * pieces)
    for stages in range(all_stages, min(_LEAST_STAGES, all_stages) - 1, -1):
        # A slot is free again when all pieces that follow its tile's in the ring have been asked for.
        slots = min((-(-stages // (own * pieces)) + 1) * own, own_most) if tile_scales else 0
        used = around + stored.teams * (stages * stage + slots * tile_scales)
        if used <= _SHARED_BYTES - way.room:
            threads = stored.threads(keeps_x=keeps_x)
            in_flight = min(max(1, way.in_flight // (stored.teams * stage)), stages)
            return Plan(
                each, more, piece, pieces, stages, in_flight, x_slots, slots, tiles, keeps_x, grid, threads, used
            )
    return None


LONG, SHORT = Way(piece=2048, kept_bytes=36 << 10, kept_from=3), Way(piece=1024, kept_bytes=72 << 10)
WAYS: dict[int, Way] = {2: LONG, MAX_ROWS: SHORT}
"""By the most rows that go this way."""
