"""Every block of docs/how-do-i.md runs, and its table of memory is what the function computes."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig, LlamaForSequenceClassification, Qwen2Config

from pods_rl.planning.memory import GIB, estimate_memory
from pods_rl.policies import tiny_policy_path
from pods_rl.recipe import Origin, build_recipe
from pods_rl.recipe.schema import fields, parse_overrides
from pods_rl.runs import Run

from .cli import pods
from .engines.test_tools import byte_tokenizer, chat_policy
from .engines.vision import make_vlm
from .test_readme import shown_commands

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-do-i.md").read_text(encoding="utf-8")
INTRODUCTION, *PARTS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
SECTIONS = {part.partition("\n")[0]: part for part in PARTS}
QUICK = ("Train on data from the hub", "Find out what fits in 24 GB")
PLACE = re.compile(r"`([\w-]+\.(?:jsonl|toml|yaml|py))`[^`]*\Z")  # the file that the text before a block names


def code_blocks(section: str) -> list[tuple[str, str, str | None]]:
    """The language and the text of each block of a section, and the file that it is saved as."""
    found = []
    before = 0
    for match in re.finditer(r"^```(\w*)\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE):
        named = PLACE.search(section[before : match.start()])
        found.append((match[1], match[2], named[1] if named else None))
        before = match.end()
    return found


def save_reward_model(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1,
        pad_token_id=0,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_policy_path() / name).read_bytes())


def save_vision_model(folder: Path) -> None:
    model, processor = make_vlm("Gemma3")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def save_chat_model(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    chat_policy(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# the models that the page names, and what makes a tiny one
STAND_INS = {
    "my-reward-model": save_reward_model,
    "google/gemma-3-4b-it": save_vision_model,
    "Qwen/Qwen3-0.6B": save_chat_model,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in SECTIONS]
)
def test_a_section_runs(name, tmp_path, monkeypatch):
    """Its files are written, its commands and its Python run, in the order of the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    names: dict = {}
    exec(code_blocks(INTRODUCTION)[0][1], names)
    blocks = code_blocks(SECTIONS[name])
    assert blocks
    for language, code, file in blocks:
        for model, save in STAND_INS.items():
            if f'"{model}"' in code and not Path(model).is_dir():
                save(Path(model))
        if file is not None:
            Path(file).write_text(code, encoding="utf-8")
            if file == "pyproject.toml":
                install(tomllib.loads(code)["project"])
            importlib.invalidate_caches()
        elif language == "python":
            exec(code, names)
        else:
            run_commands(code)
    if "trainer" in names:
        assert names["trainer"].state.global_step == 1


def install(project: dict) -> None:
    """What `pip install .` writes of a package's entry points, in the folder that the test imports from."""
    folder = Path(f"{project['name'].replace('-', '_')}-{project['version']}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, names in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines))


def run_commands(code: str) -> None:
    commands = shown_commands(f"```\n{code}```\n")
    assert len(commands) == len(code.splitlines())
    for words in commands:
        done = pods(*words)
        assert done.exit_code == 0, (words, done.output)
        if "--dry_run" in words:
            assert "rows" in done.output
        elif "--output" in words:
            assert Run.open(words[words.index("--output") + 1]).state == "finished"


def test_the_files_of_the_page_are_found():
    files = {file for section in SECTIONS.values() for _, _, file in code_blocks(section)} - {None}
    assert {file for file in files if not file.endswith(".py")} == {
        "questions.jsonl", "mine.yaml", "hub.yaml", "pyproject.toml",
    }  # fmt: skip
    assert {file for file in files if file.endswith(".py")} == {"my_rewards.py", "judge.py", "my_pods.py"}


def test_each_recipe_sets_a_learning_rate_and_lora_a_higher_one_than_the_default():
    default = fields()["learning_rate"].default
    recipes = []
    for section in SECTIONS.values():
        for language, code, _ in code_blocks(section):
            if language == "yaml":
                recipes.append(yaml.safe_load(code))
            if language == "" and "--use_peft true" in code:
                recipes.append(parse_overrides(shlex.split(code), []))
    assert sum("use_peft" in values for values in recipes) == 1
    for values in recipes:
        rate = float(values["learning_rate"])
        assert rate > default if "use_peft" in values else rate >= default


def test_a_command_is_one_line():
    """`shown_commands` would join lines that end in a backslash."""
    for section in SECTIONS.values():
        for language, code, _ in code_blocks(section):
            if not language:
                assert [shlex.split(line)[0] for line in code.splitlines()] == ["pods"] * len(code.splitlines())


# hidden, inner, layers, heads, key heads, vocabulary, tied, parameters: from the models' published configurations
SHAPES = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True, 494_032_768),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True, 1_543_714_304),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True, 3_085_938_688),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False, 7_615_616_512),
}
STEP = """
model_name_or_path: owner/model
task: gsm8k
max_prompt_length: 512
max_completion_length: 512
num_rollouts: 64
num_generations: 16
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
max_steps: 1
"""
TRAINED = {  # what the table's second column says, as keys
    "all weights": {},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "8-bit AdamW": {"optim": "adamw_8bit"},
    "LoRA": {"use_peft": True, "dtype": "bfloat16"},
    "rank 64": {"lora_r": 64},
    "4-bit base": {"load_in_4bit": True},
    "no gradient checkpointing": {"gradient_checkpointing": False},
    "vLLM at 0.35": {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.35},
}


def qwen(name: str) -> Qwen2Config:
    hidden, inner, layers, heads, key_heads, vocabulary, tied, _ = SHAPES[name]
    return Qwen2Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, vocab_size=vocabulary, tie_word_embeddings=tied,
    )  # fmt: skip


def recipe_of(**keys):
    return build_recipe(yaml.safe_load(STEP) | keys, Origin("a test"))


TABLE = re.findall(r"^\| (Qwen2.5-\S+) \| (.+) \|$", PAGE, flags=re.MULTILINE)


def test_the_table_of_memory_is_computed():
    assert len(TABLE) >= 8
    for model, cells in TABLE:
        trained, *shown, verdict = cells.split(" | ")
        keys: dict = {}
        for part in trained.split(", "):
            keys |= TRAINED[part]
        memory = estimate_memory(recipe_of(**keys), qwen(model))
        parts = (memory.weights, memory.optimizer, memory.vllm, memory.update, memory.generation, memory.peak)
        assert shown == [f"{part / GIB:.1f}" for part in parts], (model, trained)
        free = 24 - memory.peak / GIB
        assert verdict == ("yes" if free >= 4 else "barely" if free > 0 else "no"), (model, trained)


@pytest.mark.parametrize("name", SHAPES)
def test_weights_are_those_of_the_published_models(name):
    memory = estimate_memory(recipe_of(dtype="bfloat16"), qwen(name))
    assert memory.weights == 2 * SHAPES[name][-1]
    assert memory.gradients == memory.weights
    assert memory.optimizer == 2 * memory.weights
