"""Text that is out to be run: by Python, a shell, LaTeX, YAML, a browser or a terminal."""

import random
import re

CANARY = "CANARY"  # the file that running one would make
_TOUCH = f"touch {CANARY}"

CODE = (
    f"__import__('os').system('{_TOUCH}')",
    f"open('{CANARY}', 'w').write('1')",
    f"exec(\"open('{CANARY}','w')\")",
    f'eval(\'__import__("os").system("{_TOUCH}")\')',
    f"[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'][0]('{_TOUCH}', shell=True)",
    f"sin.__class__.__mro__[-1].__subclasses__()[0].__init__.__globals__['os'].system('{_TOUCH}')",
    f"lambda: __import__('subprocess').run('{_TOUCH}', shell=True)",
    f"f\"{{__import__('os').system('{_TOUCH}')}}\"",
    f"1 if __import__('os').system('{_TOUCH}') else 2",
    f"\\{{1, 2, __import__('os').system('{_TOUCH}')\\}}",
    f"{{1, 2, __import__('os').system('{_TOUCH}')}}",
    f"Symbol('x', __import__('os').system('{_TOUCH}'))",
    f"\\immediate\\write18{{{_TOUCH}}}",
    "\\input{/etc/passwd} + x^2",
    f"\\operatorname{{__import__}}('os').\\operatorname{{system}}('{_TOUCH}')",
    f"x_{{__import__('os').system('{_TOUCH}')}}^2",
    f"\\frac{{open('{CANARY}','w')}}{{2}}",
    f"{{{{7*7}}}} {{{{ ''.__class__.__mro__[1].__subclasses__() }}}} {{% import os %}}{{{{ os.system('{_TOUCH}') }}}}",
    f"$({_TOUCH}) `{_TOUCH}` ; {_TOUCH} | {_TOUCH} && {_TOUCH}",
    f"!!python/object/apply:os.system ['{_TOUCH}']",
    f"cos\nsystem\n(S'{_TOUCH}'\ntR.",
    "gASVKgAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAx0b3VjaCBDQU5BUlmUhZRSlC4=",
    f"A, 2H2 + O2 = 2H2O' ; import os; os.system('{_TOUCH}') #",
    f"%s %(x)s {{0.__class__.__init__.__globals__}} ${{jndi:ldap://127.0.0.1/{CANARY}}}",
    f"18**__import__('os').system('{_TOUCH}')+sqrt(2)*f(__import__('os'))",
)
"""Source of Python (as it is, in LaTeX and in a string), of a shell, a template, YAML and pickles."""

_LIVE = "document.title='pwned'"


def scripts(beacon: str) -> tuple[str, ...]:
    """Twenty texts that would set the page's title, or ask for the address `beacon`, were any of them live."""
    return tuple(text.replace("BEACON", beacon) for text in _SCRIPTS)


_SCRIPTS = (
    f"<script>{_LIVE}</script>",
    f"</script><script>{_LIVE}</script>",
    f"</style><script>{_LIVE}</script>",
    f"</title><script>{_LIVE}</script>",
    f'<img src=x onerror="{_LIVE}">',
    f"<svg/onload={_LIVE}>",
    f"<svg><script>{_LIVE}</script></svg>",
    f'<iframe srcdoc="<script>parent.{_LIVE}</script>"></iframe>',
    f"<iframe src=javascript:parent.{_LIVE}></iframe>",
    f'\'" autofocus tabindex=1 onfocus={_LIVE} x="',
    f"</pre></details></section><input autofocus onfocus={_LIVE}>",
    f"<details open ontoggle={_LIVE}>",
    f"<video><source onerror={_LIVE}></video>",
    f"<body onload={_LIVE}>",
    f"--><script>{_LIVE}</script><!--",
    "<base href=BEACON/><link rel=stylesheet href=x.css><meta http-equiv=refresh content='0;url=BEACON'>",
    "<style>@import 'BEACON'; * { background: url(BEACON) }</style>",
    "<object data=BEACON></object><embed src=BEACON>",
    f'<form action=BEACON><button id=f-clear></form><a href="javascript:{_LIVE}" ping=BEACON>[x](javascript:e)</a>',
    f"{{{{ 7 * 7 }}}}{{% raw %}}\u202e\x00\x1b]0;pwned\x07&lt;script&gt;{_LIVE}&#60;/script&#62; $\\frac{{$ a | b",
)
_ESCAPES = (
    "\x1b[66m", "\x1b[66;1H", "\x1b[2J\x1b[66d", "\x1b]0;66\x07", "\x1b]8;;http://66\x1b\\x\x1b]8;;\x1b\\",
    "\x1b]52;c;NjY=\x07",
    "\x1bP66q\x1b\\", "\x1b_66\x1b\\", "\x1b^66\x1b\\", "\x1bc", "\x1b[?66h", "\x9b66m", "\x9d0;66\x9c", "\x90q66\x9c",
    "\x1b(0", "\x07", "\x08\x08\x08", "\r", "\x0b", "\x0c", "\x00", "\x7f", "\x85", "\x84",
)  # fmt: skip
_DIRECTIONS = ("\u202e", "\u202d", "\u202a", "\u2066", "\u2067", "\u2068", "\u2069", "\u200e", "\u200f", "\u061c")
_MARKUP = (
    "[/foo]", "[/]", "[bold]", "[link=http://66]x[/link]", "[red]", "[/red][/red]", "[@click=app.quit]x[/]", "\\[",
    "\\", "[[", "]]", "[#ff0000 on blue]", "[blink 66]", ":smile:", "[not a tag", "[/link]", "[=]", "[a=b c]", "%s",
    "{x}", "$x$",
)  # fmt: skip
_OTHERS = (
    "\ud800", "\udfff", "\udc80", "\U0001f600", "\u0301" * 5, "\ufeff", "\u2028", "\u2029", "文", "a", " ", "12", "\n",
    "\t",
)  # fmt: skip


def fuzzed(count: int, seed: int = 5) -> list[str]:
    """Texts of escapes, marks of direction, markup and lone surrogates, in random order and number.

    >>> fuzzed(3) == fuzzed(3), len(set(fuzzed(100)))
    (True, 100)
    """
    draw = random.Random(seed)
    kinds = (_ESCAPES, _DIRECTIONS, _MARKUP, _OTHERS, tuple(map(chr, range(32))), tuple(map(chr, range(127, 160))))
    texts = []
    for number in range(count):
        pieces = [draw.choice(draw.choice(kinds)) for _ in range(draw.randint(1, 12))]
        texts.append(f"{number}{''.join(pieces)}")
    return texts


# rich's own, for a line that is redrawn, and its colours; none of ours has the 66 of the payloads
_RICH = re.compile(r"\x1b\[(?!66)[0-9;?]*[A-Za-z]|(?<![^\n])\r|\r(?=\x1b\[[12])")
_HARMFUL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmful(printed: str) -> list[str]:
    """Each character that would steer a terminal, with what stands around it."""
    left = _RICH.sub("", printed).replace("\r\n", "\n")
    return [left[max(0, found.start() - 20) : found.end() + 20] for found in _HARMFUL.finditer(left)]
