"""Every block of docs/how-do-i.md runs, and its table of memory is what the function computes."""

import importlib
import os
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForSequenceClassification

from pods_rl.policies import tiny_policy_path
from pods_rl.runs import Run

from .cli import pods
from .engines.test_tools import byte_tokenizer, chat_policy
from .engines.vision import make_vlm
from .test_readme import shown_commands

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-do-i.md").read_text(encoding="utf-8")
INTRODUCTION, *PARTS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
SECTIONS = {part.partition("\n")[0]: part for part in PARTS}
QUICK = ("Train on data from the hub",)
PLACE = re.compile(r"`([\w-]+\.(?:jsonl|yaml|py))`[^`]*\Z")  # the file that the text before a block names


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
            importlib.invalidate_caches()
        elif language == "python":
            exec(code, names)
        else:
            run_commands(code)
    if "trainer" in names:
        assert names["trainer"].state.global_step == 1


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
