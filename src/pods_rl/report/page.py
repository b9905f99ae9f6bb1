"""A report as one HTML page. It needs no network and runs no script but ours; everything from outside is escaped."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from .account import Account
from .text import plain
from .wording import number_of

_SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "templates/figures.js",
    "templates/ledger.js",
    "templates/sorting.js",
    "templates/start.js",
)
_LIVE = "templates/watch.js"
_FOLDED = 24  # rows of a table from which it is closed at first


def to_html(account: Account, *, live: bool = False, parts: bool = False) -> str:
    """Return the page. The template escapes names, logs and model output, and nothing but our own style and scripts.

    Args:
        account: what the page says.
        live: with the script that `pods watch` serves, and permission to ask its server.
        parts: without style, scripts and data: what `pods watch` exchanges in a page that is open.
    """
    scripts: list[Markup] = []
    style = Markup("")
    policy = ""
    if not parts:
        names = [*_SCRIPTS]
        if live:
            names.append(_LIVE)
        scripts = [Markup(_asset(name)) for name in names]  # trusted: files of the package
        style = Markup(_asset("vendor/uPlot.min.css") + _asset("templates/report.css"))
        policy = content_security_policy(style, *scripts, live=live)
    return _template().render(account=account, folded=_FOLDED, policy=policy, style=style, scripts=scripts)


def content_security_policy(style: str, *scripts: str, live: bool = False) -> str:
    """Allow data: images and, by their hashes, one style sheet and these scripts; style attributes for the bars.

    >>> content_security_policy("")[:84]
    "default-src 'none'; img-src data:; style-src-attr 'unsafe-inline'; style-src-elem 's"
    """
    rules = [
        "default-src 'none'",
        "img-src data:",
        "style-src-attr 'unsafe-inline'",
        f"style-src-elem {_hash(style)}",
        f"script-src {' '.join(map(_hash, scripts))}",
        "require-trusted-types-for 'script'",
    ]
    if live:
        rules.append("connect-src 'self'")
    rules += ["base-uri 'none'", "form-action 'none'"]
    return "; ".join(rules)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"plain": plain, "number_of": number_of}
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    return environment.from_string(_asset("templates/report.html.j2"))
