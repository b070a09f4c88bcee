"""From recipes to params on the device: byte ranges, read once, streamed into place.

Words of this room, from the recipes down to the bytes:

- a *target* is a tensor to be filled: a param, or a temporary one;
- a *part* is what one stored tensor gives to one target, as a view of each (`parts`);
- a *cut* is as much of a part as is read at once, in the terms of the file (`cuts`);
- a *range* is bytes of a file that lie together (`files`);
- a *job* is ranges of one file that a thread reads together, and the *copies* from its buffer to targets (`read_plan`);
- an *upload* brings bytes of a pinned buffer to a GPU (`workers`);
- a *move* goes from a temporary target to another, and what is *computed* from quantised tensors goes to a target, both
  when all is read (`stream`).

`views`, `parts`, `cuts`, `read_plan` and `files` import no torch.
"""
