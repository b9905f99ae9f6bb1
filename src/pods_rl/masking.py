"""Mask passwords and tokens, so that the files of a run can be shared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

# the last word of a name whose value is a secret: hub_token, AWS_SECRET_ACCESS_KEY, wandb.api-key
_SECRET_WORDS = frozenset((
    "token", "key", "apikey", "secret", "password", "passwd", "pwd", "pass", "passphrase", "credential", "credentials",
    "auth", "authorization",
))  # fmt: skip
# what such a word belongs to in a name that is not a secret: pad_token, question_key
_OF_DATA = frozenset((
    "eos", "bos", "pad", "unk", "sep", "cls", "mask", "image", "video", "audio", "stop", "start", "end", "begin",
    "special", "think", "next", "new", "per", "max", "min", "num", "question", "answer", "prompt", "gold", "text",
    "completion", "reward", "label", "messages", "message", "input", "output", "dataset", "data", "column", "sort",
    "group", "public", "primary", "cache", "id",
))  # fmt: skip
_WORD_OF_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # of a name in snake, kebab or camel case
# tokens that have a form of their own: of Hugging Face, OpenAI and others, GitHub, GitLab, Slack, AWS, Google, W&B; JWT
_KNOWN_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:hf|api_org|npm|gsk|r8|tgp_v1|gh[pousr]|github_pat|wandb_v\d)_[A-Za-z0-9_]{16,}"
    r"|(?:sk|pk|rk|glpat|nvapi|xai|xox[abeprs])-[A-Za-z0-9_-]{16,}"
    r"|A[KS]IA[0-9A-Z]{16}"
    r"|AIza[A-Za-z0-9_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
    r")"
)
_HEADER = re.compile(r"\b(authorization['\"]?[ \t]*[:=][ \t]*['\"]?)(?:[a-z]+[ \t]+)?[^\s'\"]+", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer[ \t]+)(?=\S*\d)[a-z0-9+/=._~-]{16,}", re.IGNORECASE)
_URL_USER = re.compile(r"(?<![A-Za-z0-9])([A-Za-z][A-Za-z0-9+.-]{1,20}://)([^\s/?#@]+)@")
_URL_PARAMETER = re.compile(r"([?&;])([A-Za-z0-9_.-]{1,60})=([^\s&;#'\"]+)")
_ASSIGNMENT = re.compile(r"(-{0,2}\+{0,2}[A-Za-z][A-Za-z0-9_.-]{0,80})(['\"]?[ \t]*[=:][ \t]*)(?=.)")
_IN_QUOTES = re.compile(r"(['\"])([A-Za-z][A-Za-z0-9_.-]{0,80})(\1[ \t]*:[ \t]*)(['\"])([^'\"]*)\4")


def mask_secrets(value: Any) -> Any:
    """Return a value with each password and token in it replaced by `***`; a tuple becomes a list.

    A secret is recognised by its name, as in `hub_token`, `--api-key` or `HF_TOKEN`, or by its form: a token with a
    known beginning, such as `hf_`, a password in a URL, and what follows `Bearer`. One without either stays.

    Args:
        value: a text, a list that holds the words of a command line, or a mapping of settings by name; the entries of
            lists and mappings are masked too.

    >>> mask_secrets(["train.py", "--hub_token", "abc", "--api-key=abc", "HF_TOKEN=abc", "--lr", "1e-6"])
    ['train.py', '--hub_token', '***', '--api-key=***', 'HF_TOKEN=***', '--lr', '1e-6']
    >>> mask_secrets({"model_init_kwargs": {"token": "abc"}, "pad_token": "<pad>", "url": "http://me:abc@host/v1"})
    {'model_init_kwargs': {'token': '***'}, 'pad_token': '<pad>', 'url': 'http://***@host/v1'}
    """
    if isinstance(value, str):
        return _mask_text(value)
    if isinstance(value, Mapping):
        masked: dict[Any, Any] = {}
        for name, entry in value.items():
            is_secret = isinstance(name, str) and isinstance(entry, str) and entry != "" and _names_secret(name)
            masked[name] = MASK if is_secret else mask_secrets(entry)
        return masked
    if isinstance(value, (list, tuple)):
        return _mask_words(value)
    return value


def _mask_words(words: list[Any] | tuple[Any, ...]) -> list[Any]:
    """Return the words of a command line without the values of options that are secrets."""
    masked: list[Any] = []
    option = ""  # the word before, if it is an option whose value follows
    for word in words:
        if not isinstance(word, str):
            masked.append(mask_secrets(word))
            option = ""
            continue
        assignment = _ASSIGNMENT.match(word)
        if option and not word.startswith("-") and _names_secret(option):
            masked.append(MASK)
        elif assignment and _names_secret(assignment[1]):
            masked.append(f"{assignment[0]}{MASK}")
        else:
            masked.append(_mask_text(_IN_QUOTES.sub(_mask_quoted, word)))
        option = word if word.startswith("-") and "=" not in word else ""
    return masked


def _mask_quoted(match: re.Match[str]) -> str:
    if not _names_secret(match[2]):
        return match[0]
    return f"{match[1]}{match[2]}{match[3]}{match[4]}{MASK}{match[4]}"


def _mask_text(text: str) -> str:
    text = _KNOWN_TOKEN.sub(MASK, text)
    text = _HEADER.sub(rf"\1{MASK}", text)
    text = _BEARER.sub(rf"\1{MASK}", text)
    text = _URL_USER.sub(rf"\1{MASK}@", text)
    return _URL_PARAMETER.sub(_mask_parameter, text)


def _mask_parameter(match: re.Match[str]) -> str:
    is_secret = _names_secret(match[2]) or match[2].lower() in ("sig", "signature", "x-amz-signature")
    return f"{match[1]}{match[2]}={MASK}" if is_secret else match[0]


def _names_secret(name: str) -> bool:
    """Return whether a name is one of a secret.

    >>> _names_secret("--hub-token"), _names_secret("apiKey"), _names_secret("pad_token"), _names_secret("max_tokens")
    (True, True, False, False)
    """
    words = [word.lower() for word in _WORD_OF_NAME.findall(name)]
    if not words or words[-1] not in _SECRET_WORDS:
        return False
    return len(words) == 1 or words[-2] not in _OF_DATA
