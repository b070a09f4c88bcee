"""Small files of a model's directory: regular ones of bounded size, because anybody may have put them there."""

from __future__ import annotations

from pathlib import Path

from precast.ir import files
from precast.ir.errors import BuildError

GENERATION = "generation_config.json"
FIX = "correct the file, or download it again"


def read_small(path: Path, what: str, *, most: int, code: str) -> bytes | None:
    """The content of a file of at most `most` bytes; None where there is no such file.

    `what` is its name in messages. Raises BuildError of this code for a directory, pipe, socket or device, which is
    never waited for, for a file that can't be read, for a larger one, and for a pointer of Git LFS.
    """
    try:
        data = files.read_file(path, most)
    except FileNotFoundError:
        return None
    except OSError as error:
        fix = "replace it by the file itself, or correct its permissions"
        raise BuildError(code, f"{what} can't be read: {error.strerror}", fix=fix) from error
    if len(data) > most:
        raise BuildError(code, f"{what} has more than {most} bytes", fix=FIX)
    if data.startswith(files.LFS_POINTER):
        message = f"{what} is a pointer of Git LFS, not the file that it stands for"
        raise BuildError(code, message, fix=files.LFS_FIX)
    return data
