"""Python imports this at its start, in every process that has this folder on PYTHONPATH: a line for each event.

`PODS_AUDIT` names the file. Written down: code made from text, processes, the network, pickles, and what is written,
made, moved or removed on the disk. What C++ and Rust write is in no audit event: the tests compare folders for that.
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
_DOING = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "subprocess.Popen", "pty.spawn",
    "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto", "urllib.Request", "pickle.find_class",
    "ctypes.dlopen", "webbrowser.open", "code.__new__",
)  # fmt: skip


def _kind(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        writes = (flags or 0) & _WRITING or (isinstance(mode, str) and set(mode) & set("wax+"))
        return "write" if writes and not isinstance(path, int) else None
    if event in _ON_DISK:
        return "disk"
    if event in _DOING:
        return "doing"
    if event == "pods.mark":
        return "mark"
    if event == "exec" and getattr(arguments[0], "co_filename", "").startswith("<"):
        return "exec"  # made from text; a module's code names its file
    if event == "compile" and isinstance(arguments[0], (str, bytes)) and str(arguments[1]).startswith("<"):
        return "compile"
    return None


def _audit(event, arguments):
    if not event.startswith(
        ("os.", "open", "exec", "compile", "sub", "so", "pi", "sh", "te", "ct", "ur", "co", "pt", "pods")
    ):
        return
    kind = _kind(event, arguments)
    if kind is None:
        return
    where = _where()
    line = {"pid": os.getpid(), "kind": kind, "event": event, "where": where}
    line["what"] = [_shown(argument) for argument in arguments[:2]]
    os.write(_channel, (json.dumps(line) + "\n").encode())


def _where():
    try:
        frame = sys._getframe(2)
    except ValueError:  # the interpreter itself, before or after any code of ours
        return "?"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _shown(argument):
    if hasattr(argument, "co_filename"):
        return f"{argument.co_filename} {argument.co_name} {argument.co_names[:8]}"
    text = os.fsdecode(argument) if isinstance(argument, (str, bytes, os.PathLike)) else repr(argument)
    return os.path.abspath(text) if isinstance(argument, os.PathLike) else text[:300]


if _LOG:
    _channel = os.open(_LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    sys.addaudithook(_audit)
