"""Load a policy and its tokenizer, and render prompts, for training and evaluation."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import _compile_jinja_template
from trl import ModelConfig, get_quantization_config
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
)

from ..errors import UserError, hub_problem, users_code
from ..recipe import Recipe
from ..tasks import Prompt, Task
from ..text import suggest
from . import ADAPTER_CONFIG, Policy, gpu_has_bf16, weight_files

# what transformers and the tokenizer give every template
_GIVEN_VARIABLES = frozenset(("messages", "raise_exception", "strftime_now", "bos_token", "eos_token", "pad_token"))


def check_policy(path: str, revision: str = "main") -> PreTrainedModel | None:
    """Check that a policy's files are complete and consistent, without reading its weights. Takes about a second.

    Returns the model on the device "meta", without an adapter; None if it is quantised.

    Args:
        path: a folder, or a hub id, whose files are downloaded.
        revision: of a model on the hub.

    Raises:
        UserError: a file is missing, truncated or a pickle, or config.json does not match the weights.
    """
    folder = Path(path)
    with _one_line(f"model_name_or_path = {path}"):
        if folder.is_dir():
            files = weight_files(folder)
            if (folder / ADAPTER_CONFIG).is_file():
                for file in files:
                    safe_open(file, framework="pt")  # reads the header and compares the file's length with it
                adapter = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
                return check_policy(adapter["base_model_name_or_path"], revision)
        return _check_model(path, revision)


def _check_model(path: str, revision: str) -> PreTrainedModel | None:
    """Raise ValueError, or an error of transformers, if config.json and the weights of a model do not match.

    Returns the model on the device "meta"; None if it is quantised.
    """
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    if not config.architectures:
        raise ValueError("config.json names no architecture")
    if getattr(config, "quantization_config", None) is not None:
        return None  # its library loads quantised weights in its own format
    kind = getattr(transformers, config.architectures[0], AutoModelForCausalLM)
    # On the device "meta" transformers compares names and shapes, and reads no weights.
    model, info = kind.from_pretrained(
        path,
        revision=revision,
        device_map="meta",
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"{len(missing)} of its weights are missing, such as {missing[0]}")
    mismatched = sorted(key[0] for key in info["mismatched_keys"])
    if mismatched:
        raise ValueError(
            f"{len(mismatched)} of its weights have another shape than config.json says, such as {mismatched[0]}"
        )
    return cast(PreTrainedModel, model)


def load_policy(policy: Policy, recipe: Recipe, device: torch.device) -> PreTrainedModel | PeftModel:
    """Load a model with the recipe's precision, attention and quantisation, and its adapter, which is not merged.

    No code of the model's repository is run.

    Raises UserError if the files do not match, or lack weights: transformers and PEFT would draw these at
    random.
    """
    options = load_options(recipe)
    options["revision"] = None  # the files are local
    name = policy.name
    if policy.adapter is not None:
        name += f" with {policy.adapter_name}"
    with _one_line(name):
        model, info = AutoModelForCausalLM.from_pretrained(
            policy.model, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
        )
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}")
        if policy.adapter is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "Found missing adapter keys")
                model = PeftModel.from_pretrained(model, str(policy.adapter))
    if options.get("quantization_config") is None:  # bitsandbytes places a quantised model itself
        model.to(device)
    return model


def load_tokenizer(path: str | Path, revision: str = "main") -> PreTrainedTokenizerBase:
    """Load a tokenizer that pads on the left, as generation needs; raises UserError if its files are not complete."""
    options = {"trust_remote_code": False, "padding_side": "left", "truncation_side": "left"}
    with _one_line(f"The tokenizer in {path}"):
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, **options)
        if not tokenizer("1")["input_ids"]:  # without its files transformers makes an empty one
            raise ValueError("it has no vocabulary")
    return tokenizer


def load_options(recipe: Recipe) -> dict[str, Any]:
    """Return keywords of `from_pretrained` for a policy: revision, precision, attention, quantisation if set."""
    model = ModelConfig(**recipe.model_arguments())
    options = {
        "revision": model.model_revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        "quantization_config": get_quantization_config(model),
    }
    return {name: value for name, value in options.items() if value is not None}


def uses_bf16(on_cpu: bool) -> bool:
    """Return whether a recipe that sets neither bf16 nor fp16 computes in bf16: on a GPU that has it in hardware.

    On a CPU the default is float32, which generated 1.3 times faster, even where the processor has bf16 instructions.
    """
    return not on_cpu and gpu_has_bf16()


def template_options(recipe: Recipe) -> Mapping[str, Any]:
    """A recipe's `chat_template_kwargs`, a mapping or its JSON, as TRL takes it; raises UserError for anything else."""
    value = recipe.values.get("chat_template_kwargs") or {}
    options = value
    if isinstance(value, str):
        try:
            options = json.loads(value)
        except ValueError:
            options = None
    if not isinstance(options, dict):
        raise UserError(f"chat_template_kwargs = {value}: expected a mapping, as in {{enable_thinking: false}}.")
    return options


def check_template_options(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
    """Raise UserError for entries of `chat_template_kwargs` that the policy's chat template does not read.

    Without a chat template nothing is read, and nothing is checked: the recipe may be that of another policy.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template or not options:
        return
    templates = template.values() if isinstance(template, dict) else [template]
    read: set[str] = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    variables: set[str] = set()
    try:
        for text in templates:
            environment = _compile_jinja_template(text).environment  # with the tags that transformers adds
            variables |= find_undeclared_variables(environment.parse(text))
    except TemplateError:  # rendering the first prompt reports it
        return
    for entry in options:
        if entry in variables or entry in read:
            continue
        settings = sorted(variables - read - _GIVEN_VARIABLES)
        raise UserError(
            f"chat_template_kwargs: {entry}: the policy's chat template reads no such variable."
            f"{suggest(entry, settings)} It reads {', '.join(settings) or 'none'}. Remove the entry."
        )


def tool_options(tokenizer: PreTrainedTokenizerBase, task: Task) -> dict[str, Any]:
    """Return the arguments of the chat template for a task with tools, as TRL renders it; none for other tasks.

    They are the tools, and a template that keeps earlier turns as they were if the policy's own does not. The tokenizer
    gets the response template that finds tool calls in its text, if it has none.

    Raises UserError if the policy cannot call tools.
    """
    if not task.converses:
        return {}
    if isinstance(task.test[0]["prompt"], str):
        raise UserError(f"The task {task.name} has tools, and prompts of plain text: tools need chat messages.")
    tools = task.list_tools()
    for tool in tools:
        with users_code(f"the task {task.name}: the description of its tool {tool.__name__}"):
            get_json_schema(tool)  # as the chat template will
    options: dict[str, Any] = {"tools": tools or None}
    try:
        if not supports_tool_calling(tokenizer):
            raise ValueError("it has no chat template that writes tool calls and their results.")
        has_template = getattr(tokenizer, "response_template", None) is not None
        has_schema = getattr(tokenizer, "response_schema", None) is not None
        if not has_template and not has_schema:
            add_response_schema(tokenizer)
        if not is_chat_template_prefix_preserving(tokenizer):
            options["chat_template"] = get_training_chat_template(tokenizer)
    except Exception as error:  # a template is a program, and may raise anything
        raise UserError(
            f"The task {task.name} has tools, and the policy {tokenizer.name_or_path or 'given'} cannot call them: "
            f"{_first_line(error)} Use a chat model whose template has tools, such as Qwen3."
        ) from error
    return options


def render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, **options: Any) -> str:
    """Return the text that the model continues: text unchanged, chat messages rendered with the model's template.

    `options` are more arguments of the template (`template_options`).

    Raises UserError for messages if the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return prompt
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(
            f"The tokenizer of {tokenizer.name_or_path or 'this policy'} has no chat template, and the task's prompts "
            "are chat messages: set prompt_style: plain to write them as text."
        )
    return str(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **options))


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, text: str) -> list[int]:
    """Return the tokens of a rendered prompt; a chat template has written its special tokens already."""
    return list(tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"])


def longest(tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], **options: Any) -> int:
    """Return the tokens of the longest prompt, 0 without prompts; `options` are those of `render`."""
    return max((len(encode(tokenizer, prompt, render(tokenizer, prompt, **options))) for prompt in prompts), default=0)


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """In this context, an error of transformers, PEFT or safetensors becomes a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each library raises errors of its own
        problem = hub_problem(error)
        if problem:
            raise UserError(
                f"{what} is not in the local cache, and the hub cannot be reached ({problem}). Check the network, or "
                "name a local folder."
            ) from error
        raise UserError(
            f"{what} cannot be loaded: {_first_line(error)} Expected all files of a causal language model that "
            "transformers knows."
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    message = lines[0].strip() if lines else type(error).__name__
    if not message.endswith((".", "!")):
        message += "."
    return message
