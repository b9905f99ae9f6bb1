"""A tokenizer with tool calls for tiny policies: its chat template writes them, its response template finds them."""

from tokenizers import AddedToken
from tools.pretrain import EOS, IGNORED, Example, build_tokenizer
from transformers import Qwen2Tokenizer

MARKS = ("<assistant>", "<tool>", "</tool>", "<result>", "</result>")
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<assistant>' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool>' + call.function.name }}
{%- for name, value in call.function.arguments.items() %}{{ ' ' + name + '=' + value }}{% endfor %}{{ '</tool>' }}
{%- endfor %}{{ '<|im_end|>' }}
{%- elif message.role == 'tool' %}{{ '<result>' + message.content + '</result>' }}
{%- else %}{{ message.content + '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<tool>(?P<name>\w+) ",
            "close": "</tool>",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": "="},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": EOS, "content": "text"},
    },
}


def build_policy_tokenizer() -> Qwen2Tokenizer:
    """Return the tokenizer of single bytes, with a token for each word of a call and for each mark."""
    tokenizer = build_tokenizer(["calculator expression"] * 2, 1000)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    return tokenizer


def encode(tokenizer: Qwen2Tokenizer, question: str, turns: list[tuple[str, str]]) -> Example:
    """Return the tokens of a conversation, put together turn by turn as in training, and their labels."""
    ids = tokenizer.encode(f"{question}\n<assistant>")
    labels = [IGNORED] * len(ids)
    for said, result in turns:
        own = tokenizer.encode(f"{said}{EOS}")
        heard = tokenizer.encode(f"<result>{result}</result><assistant>") if result else []
        ids += own + heard
        labels += own + [IGNORED] * len(heard)
    return ids, labels
