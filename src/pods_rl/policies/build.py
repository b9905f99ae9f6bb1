"""The shipped policies before training: a tokenizer, of single bytes or fitted to texts, and a small Qwen2 model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, EOS = "<|endoftext|>", "<|im_end|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def build_tokenizer(texts: Iterable[str] = (), size: int = 0) -> Qwen2Tokenizer:
    """Make the tokenizer: a token per byte, and one for each of the four tags.

    Its class is the one that `AutoTokenizer` expects for the model. The tags are ordinary tokens: decoding with
    `skip_special_tokens=True`, as trainers do, must keep them. Padding is on the left, as generation needs it.

    With a `size`, frequent parts of words in `texts` become tokens too (byte-pair encoding), up to `size` tokens
    without the tags. Digits stay single. The same texts give the same tokens.

    >>> tokenizer = build_tokenizer()
    >>> tokenizer.decode(tokenizer("<think>1+2=3</think>")["input_ids"], skip_special_tokens=True)
    '<think>1+2=3</think>'
    >>> len(tokenizer("<think>1+2")["input_ids"])
    4
    >>> build_tokenizer(["ten apples"] * 2, 300).tokenize("22 apples")
    ['2', '2', 'Ġapples']
    """
    symbols = [PAD, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = _tokenizer(vocabulary, [])
    if size:
        fitted = Tokenizer(models.BPE())
        fitted.pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        fitted.train_from_iterator(
            texts, trainers.BpeTrainer(vocab_size=size - 2, initial_alphabet=alphabet, show_progress=False)
        )
        merges = [tuple(pair) for pair in json.loads(fitted.to_str())["model"]["merges"]]
        vocabulary |= {"".join(pair): len(symbols) + index for index, pair in enumerate(merges)}
        tokenizer = _tokenizer(vocabulary, merges)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def _tokenizer(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Qwen2Tokenizer:
    return Qwen2Tokenizer(
        vocabulary, merges, unk_token=PAD, pad_token=PAD, eos_token=EOS, padding_side="left", model_max_length=256
    )


def build_model(tokenizer: Qwen2Tokenizer, **sizes: Any) -> Qwen2ForCausalLM:
    """Make the untrained model, about 0.9 million parameters; `sizes` replaces entries of its `Qwen2Config`.

    It has few and wide layers: on a CPU, a layer costs about the same for a generated token, whatever its width.

    >>> build_model(build_tokenizer(), hidden_size=20, intermediate_size=32).config.num_hidden_layers
    3
    """
    shape = {"num_hidden_layers": 3, "hidden_size": 160, "intermediate_size": 480}
    shape |= {"num_attention_heads": 5, "num_key_value_heads": 1}  # 1: copying the cache is half of decoding
    settings = shape | {"initializer_range": 0.06} | sizes  # at the usual 0.02 sums are learned many times slower
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **settings,
    )
    return Qwen2ForCausalLM(config)
