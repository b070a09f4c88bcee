"""What a load says where the driver alone doesn't run the model: it chooses a backend."""

from __future__ import annotations

from precast.ir.artifact import Bundle


class UnfitError(Exception):
    """The driver alone doesn't run the model: it says why in a few words. `opened`: the bundle, if it was opened."""

    def __init__(self, why: str, opened: Bundle | None = None) -> None:
        super().__init__(why)
        self.opened = opened
