"""What a verifier process is barred from once it is warm: model output goes through libraries that know `eval`.

math-verify hands the digits of a number to sympy's own parser, which evaluates text as Python. Nothing but digits was
ever seen to get there, and here nothing else can. A second wall stands behind it, whatever the text found a way to:
no process, no network, no file written, no pickle.
"""

from __future__ import annotations

import os
import re
import sys
from functools import wraps
from typing import Any

_HARMLESS = re.compile(r"\s*[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\s*|[A-Za-z][A-Za-z0-9]*")
_BARRED = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.kill", "os.startfile",
    "subprocess.Popen", "pty.spawn", "socket.", "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser.",
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "shutil.", "tempfile.", "pickle.find_class",
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def close_off() -> None:
    """Bar this process, for good: call it when everything is imported, before the first answer of a model.

    What runs into the barrier gets a PermissionError, so that the answer is not right. An audit hook is no jail for
    machine code, but all that text could become here is Python.
    """
    from sympy.parsing import sympy_parser

    read = sympy_parser.parse_expr

    @wraps(read)
    def read_harmless(text: str, *args: Any, **kwargs: Any) -> Any:
        if not is_harmless(text):
            raise PermissionError(f"{text[:80]!r} is neither a number nor a name: it is not evaluated")
        return read(text, *args, **kwargs)

    sympy_parser.parse_expr = read_harmless  # sympify looks it up each time
    sys.addaudithook(_refuse)


def is_harmless(text: object) -> bool:
    """Whether evaluating a text can do nothing: a number in digits, or a bare name (sympy's own, at late imports).

    >>> is_harmless("0.25"), is_harmless("1e9"), is_harmless("kilo")
    (True, True, True)
    >>> is_harmless("f(1)"), is_harmless("x.y"), is_harmless("__import__"), is_harmless("1if 1else 2")
    (False, False, False, False)
    """
    return isinstance(text, str) and _HARMLESS.fullmatch(text) is not None


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        _, mode, flags = arguments
        if ((flags or 0) & _WRITING) or (isinstance(mode, str) and set(mode) & set("wax+")):
            raise PermissionError("a verifier process writes no file")
    elif event.startswith(_BARRED):
        raise PermissionError(f"a verifier process does no {event}")
