"""The tiny policy before training: a character tokenizer and a small Qwen2 model with random weights."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, EOS = "<|pad|>", "<|end|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# Every printable ASCII character, so that any plain prompt can be read, even one the policy cannot answer.
CHARACTERS = "\n" + "".join(sorted(string.digits + string.ascii_letters + string.punctuation + " "))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer: a token per printable ASCII character, and one for each of the four tags.

    The tags are ordinary tokens: decoding with `skip_special_tokens=True`, as trainers do, must keep them.
    Any other character is read as `?`. Padding goes to the left, where generation needs it.

    >>> tokenizer = build_tokenizer()
    >>> tokenizer.decode(tokenizer("<think>1+2=3</think>")["input_ids"], skip_special_tokens=True)
    '<think>1+2=3</think>'
    >>> len(tokenizer("<think>1+2")["input_ids"])
    4
    """
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="?"))
    characters.decoder = decoders.Fuse()
    characters.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, **sizes: Any) -> Qwen2ForCausalLM:
    """Make the untrained model, about 0.9 million parameters; `sizes` replaces entries of its `Qwen2Config`.

    Few layers and a wide one each: on a CPU, a generated token costs about the same for every layer it passes,
    whatever the layer's width.

    >>> build_model(build_tokenizer(), hidden_size=32, intermediate_size=64).config.num_hidden_layers
    2
    """
    shape = {"num_hidden_layers": 2, "hidden_size": 192, "intermediate_size": 512}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4}
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
