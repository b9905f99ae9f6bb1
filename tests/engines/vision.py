"""Tiny vision-language models with random weights, one of each family that TRL trains, made without any download.

Their image processors are those of Pillow: the others need torchvision. The families differ in how the tensors of
images follow the rows of a batch: by patch (Qwen), image (Gemma, LLaVA), tile (InternVL) or row (Idefics).
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, set_seed
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL = {
    "pad_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
    "bos_token": "<bos>",
    "unk_token": "<unk>",
    "image_token": "<image>",
    "video_token": "<|video_pad|>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<image>",
    "boa_token": "<boa>",
    "eoa_token": "<eoa>",
    "audio_token": "<audio>",
}
OTHERS = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<fake_token_around_image>", "<end_of_utterance>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{{ 'IMAGE' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 4096, "initializer_range": 0.2}
EYES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def make_tokenizer(image_token: str) -> PreTrainedTokenizerFast:
    """A token for each printable character, and the special tokens of all families."""
    special = SPECIAL | {"image_token": image_token, "context_image_token": image_token}
    names = list(dict.fromkeys([*special.values(), *OTHERS, *TAGS]))
    symbols = [*names, "\n", *map(chr, range(32, 127))]
    backend = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)
    tokenizer.add_special_tokens({"extra_special_tokens": OTHERS})
    tokenizer.add_tokens(TAGS)
    return tokenizer


def without_videos(processor_class: type) -> type:
    """The processor's class, which takes None for the parts of video and sound; those of video need torchvision."""

    def check(self: Any, name: str, value: Any) -> Any:
        return None if value is None else processor_class.check_argument_for_proper_class(self, name, value)

    return type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": check})


def _qwen(name: str, config: str, text: dict[str, Any], vision: dict[str, Any], patch: int) -> Callable[[], Any]:
    processor_class = {"Qwen2VL": "Qwen2VLProcessor", "Qwen2_5_VL": "Qwen2_5_VLProcessor"}.get(name, "Qwen3VLProcessor")

    def build() -> Any:
        tokenizer = make_tokenizer("<|image_pad|>")
        images = Qwen2VLImageProcessorPil(
            patch_size=patch, merge_size=2, size={"shortest_edge": 4 * patch**2, "longest_edge": 64 * patch**2}
        )
        processor = without_videos(getattr(transformers, processor_class))(
            images,
            tokenizer,
            None,
            chat_template=TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
        )
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        ids = {f"{part}_token_id": tokenizer.convert_tokens_to_ids(f"<|{part}_pad|>") for part in ("image", "video")}
        ids |= {
            f"{part}_token_id": tokenizer.convert_tokens_to_ids(f"<|{part}|>")
            for part in ("vision_start", "vision_end")
        }
        eyes = {"depth": 1, "num_heads": 2, "patch_size": patch, "spatial_merge_size": 2} | vision
        words = TEXT | {"vocab_size": len(tokenizer), "rope_parameters": rope} | text
        return processor, getattr(transformers, config)(text_config=words, vision_config=eyes, **ids)

    return build


_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
}  # fmt: skip
_LINEAR |= {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 1.0,
    }
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
_SMALL = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 16}


def _gemma3() -> Any:
    tokenizer = make_tokenizer("<image>")
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    template = TEMPLATE.replace("IMAGE", "<boi>")
    processor = transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)
    text = TEXT | {"vocab_size": len(tokenizer), "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3Config(
        text_config=text | {"sliding_window": 512},
        vision_config=EYES
        | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )
    return processor, config


def _gemma4() -> Any:
    tokenizer = make_tokenizer("<image>")
    images = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=3)
    processor = without_videos(transformers.Gemma4Processor)(
        None, images, tokenizer, None, chat_template=TEMPLATE.replace("IMAGE", "<image>"), image_seq_length=70
    )
    text = TEXT | {"vocab_size": len(tokenizer), "layer_types": ["sliding_attention", "full_attention"]}
    text |= {"global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(tokenizer)}
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config=EYES | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 630},
        audio_config=None,
        **{
            f"{part}_token_id": getattr(tokenizer, f"{part}_token_id")
            for part in ("image", "boi", "eoi", "boa", "audio")
        },
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
        eoa_token_index=tokenizer.eoa_token_id,
    )
    return processor, config


def _llava_next() -> Any:
    tokenizer = make_tokenizer("<image>")
    grid = [[16, 32], [32, 16], [32, 32]]
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=grid
    )
    processor = transformers.LlavaNextProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )  # fmt: skip
    config = transformers.LlavaNextConfig(
        text_config=TEXT | {"model_type": "mistral", "vocab_size": len(tokenizer), "sliding_window": None},
        vision_config=EYES
        | {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4, "num_hidden_layers": 2},
        image_token_index=tokenizer.image_token_id,
        image_grid_pinpoints=grid,
        image_seq_length=16,
    )
    return processor, config


def _idefics3() -> Any:
    tokenizer = make_tokenizer("<image>")
    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    template = TEMPLATE.replace("IMAGE", "<image>")
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    config = transformers.Idefics3Config(
        text_config=TEXT | {"model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config=EYES | {"image_size": 16, "patch_size": 4},
        image_token_id=tokenizer.image_token_id,
        scale_factor=2,
    )
    return processor, config


def _internvl() -> Any:
    tokenizer = make_tokenizer("<image>")
    images = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=3)
    processor = without_videos(transformers.InternVLProcessor)(
        images, tokenizer, None, image_seq_length=4, chat_template=TEMPLATE.replace("IMAGE", "<image>")
    )
    config = transformers.InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2", "vocab_size": len(tokenizer)},
        vision_config=EYES | {"image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=tokenizer.image_token_id,
        image_seq_length=4,
    )
    return processor, config


FAMILIES: dict[str, Callable[[], Any]] = {
    "Qwen2VL": _qwen("Qwen2VL", "Qwen2VLConfig", {}, {"embed_dim": 16, "hidden_size": 16}, 4),
    "Qwen2_5_VL": _qwen(
        "Qwen2_5_VL", "Qwen2_5_VLConfig", {}, _SMALL | {"window_size": 16, "fullatt_block_indexes": [0]}, 4
    ),
    "Qwen3_5": _qwen("Qwen3_5", "Qwen3_5Config", _LINEAR, _SMALL | {"num_position_embeddings": 64}, 4),
    "Qwen3_5Moe": _qwen(
        "Qwen3_5Moe", "Qwen3_5MoeConfig", _LINEAR | _EXPERTS, _SMALL | {"num_position_embeddings": 64}, 4
    ),
    "Gemma3": _gemma3,
    "Gemma4": _gemma4,
    "LlavaNext": _llava_next,
    "Idefics3": _idefics3,
    "InternVL": _internvl,
}


def make_vlm(family: str) -> tuple[Any, Any]:
    """Return a model of a family with random weights, and its processor."""
    processor, config = FAMILIES[family]()
    set_seed(7)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1 and not weights.any():
                weights.normal_(std=0.2)  # Gemma 3's projection starts at zero, which would hide the images
    tokenizer = processor.tokenizer
    # Every digit ends a completion too, so that random weights write rows of many lengths.
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list("0123456789"))]
    model.generation_config.eos_token_id = ends
    return model.to(torch.float32), processor


def picture(width: int, height: int, seed: int) -> Image.Image:
    """An image of noise."""
    noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(noise.numpy())
