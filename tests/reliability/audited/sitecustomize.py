"""Python imports this at its start, in every process that has this folder on PYTHONPATH: a line for each event.

`PODS_AUDIT` names the file. Written down: what is written, made, moved or removed on the disk. What C++ and Rust write
is in no audit event: the tests compare folders for that.
"""

import json
import os
import sys

_LOG = os.environ.get("PODS_AUDIT")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_ON_DISK = (
    "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.utime",
    "shutil.rmtree", "tempfile.mkstemp", "tempfile.mkdtemp",
)  # fmt: skip


def _kind(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        writes = (flags or 0) & _WRITING or (isinstance(mode, str) and set(mode) & set("wax+"))
        return "write" if writes and not isinstance(path, int) else None
    if event in _ON_DISK:
        return "disk"
    return None


def _audit(event, arguments):
    kind = _kind(event, arguments)
    if kind is None:
        return
    line = {"kind": kind, "event": event, "what": [_shown(argument) for argument in arguments[:2]]}
    os.write(_channel, (json.dumps(line) + "\n").encode())


def _shown(argument):
    text = os.fsdecode(argument) if isinstance(argument, (str, bytes, os.PathLike)) else repr(argument)
    return os.path.abspath(text) if isinstance(argument, os.PathLike) else text[:300]


if _LOG:
    _channel = os.open(_LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    sys.addaudithook(_audit)
