"""What goes to a terminal: text of users and models made harmless, and the consoles it goes through."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# C0 and C1 controls but for newline and tab, and the marks that turn the direction of text
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def safe_text(value: object) -> str:
    """Text that cannot steer a terminal or rich: controls shown as \\x1b, markup escaped.

    >>> safe_text("[red]\\x1b[2J")
    '\\\\[red]\\\\x1b[2J'
    """
    from rich.markup import escape

    return escape(plain_text(value))


def plain_text(value: object) -> str:
    """As safe_text, for places that read no markup.

    >>> plain_text("a\\rb")
    'a\\\\x0db'
    """
    return _CONTROL.sub(lambda match: _shown(match[0]), str(value))


def console(*, stderr: bool = False) -> Console:
    """A console that leaves paths and numbers uncoloured; plain where the output is no terminal."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True)


def _shown(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
