"""Which tiles cuBLASLt computes products of float8 in whose rows have scales.

The library proposes tiles of 128 x 128 for them, whatever the sizes are: a layer of 4,096 outputs then leaves half of
an H200 idle with 256 rows. It has others, with which results have the same bits. Here the one is chosen that takes the
least time: whole turns of all multiprocessors, each with a tile, by what a turn of such tiles takes.

Only of versions whose results were compared (`test_tiles_change_no_bits`): with scales of blocks the library says that
it takes tiles with which its results are wrong.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Outputs and rows of a tile, the number that `cublasLtMatmulTile_t` has for it, and what a turn of such tiles
    takes, where one of `WHOLE` takes 1."""

    outputs: int
    rows: int
    number: int
    cost: float


WHOLE = Tile(128, 128, 20, 1.0)
TILES = (
    WHOLE,
    Tile(128, 96, 33, 0.81),
    Tile(128, 64, 18, 0.66),
    Tile(64, 192, 116, 0.83),
    Tile(64, 160, 326, 0.74),
    Tile(64, 128, 17, 0.64),
    Tile(64, 112, 321, 0.6),
    Tile(64, 96, 26, 0.56),
    Tile(64, 80, 318, 0.51),
    Tile(64, 64, 15, 0.49),
)
"""Costs are those of an H200 with layers of Llama 3.1 8B; that of 64 x 112 lies between those of its neighbours."""
COMPARED = (1301,)
"""Major and minor version of the library, such as 1301 for 13.1, whose results were compared on a GPU."""
MOST_ROWS = 1024
"""Of more rows tiles are so many that no turn counts, and prompts were faster with what the library proposes."""
_NUM_SMS = 132
"""Streaming multiprocessors of H100 SXM, H200 and GH200."""


def best_tile(rows: int, outputs: int) -> Tile | None:
    """The tile for a product of so many rows and outputs; None for more than `MOST_ROWS`. All but `WHOLE` divide the
    rows: a tile that ends beyond them can take twice its time."""
    if rows > MOST_ROWS:
        return None

    def turns(tile: Tile) -> int:
        num_tiles = -(-outputs // tile.outputs) * -(-rows // tile.rows)
        return -(-num_tiles // _NUM_SMS)

    fitting = [tile for tile in TILES if tile == WHOLE or rows % tile.rows == 0]
    return min(fitting, key=lambda tile: turns(tile) * tile.cost)
