"""Tell a full disk from other faults, whichever library met it. No torch."""

from __future__ import annotations

import errno
import re

# no room, no quota, a file too large, a disk gone read-only
_ERRNOS = tuple(number for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS") if (number := getattr(errno, name, None)))
# safetensors and torch.save raise errors of their own
_SAFETENSORS = re.compile(r"os error (\d+)")
_TORCH = re.compile(r"inline_container|PytorchStreamWriter|iostream error")


def write_failure(error: BaseException) -> str | None:
    """Why nothing more could be written, where that is what an error comes of; else None.

    >>> write_failure(OSError(28, "No space left on device"))
    'No space left on device'
    >>> write_failure(FileNotFoundError(2, "No such file or directory")) is None
    True
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _ERRNOS:
            return seen.strerror or str(seen)
        if (found := _SAFETENSORS.search(str(seen))) and int(found[1]) in _ERRNOS:
            return str(seen).splitlines()[0]
        if isinstance(seen, RuntimeError) and _TORCH.search(str(seen)):
            return "a file could not be written to its end"
        seen = seen.__cause__ or seen.__context__
    return None
