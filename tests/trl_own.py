"""TRL's own tests of its GRPO trainer, three times: with TRL's trainer, and with ours at n = m and at n = 2m.

`make test-trl TRL=path/to/a/clone/of/trl` needs nothing of the hub. The clone should be at the tag of the installed
TRL, such as v1.16.0; at another one it says so. Stand-ins are models with random weights and Qwen's vocabulary, the
tiny vision-language models of `tests/engines/vision.py`, and rows of the data sets that the clone's own scripts write.
At n = 2m a test's fake generator, written for m rows of each prompt, is asked for each half. As a plug-in of pytest
(`-p tests.trl_own`) this module replaces the trainer and its configuration in TRL's test module.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import xml.etree.ElementTree as Tree
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
import trl
from datasets import DatasetDict
from tokenizers import AddedToken
from transformers.convert_slow_tokenizer import TikTokenConverter
from trl import chat_template_utils, import_utils

from pods_rl import PODSConfig, PODSTrainer
from tests.engines import vision

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/trl-own"
SITE = WORK / "site"  # what `make` installs for these tests alone
HUB = "trl-internal-testing"  # a folder of this name in the working directory stands in for the hub's
TESTS = "test_grpo_trainer"
NEEDED = {"__init__.py", "conftest.py", "testing_utils.py", f"{TESTS}.py"}  # its package would hide the installed one
MODES = {"TRL": 0, "n = m": 1, "n = 2m": 2}
TIMES = MODES[os.environ.get("TRL_OWN_MODE", "TRL")]  # of the process that runs the tests
CHOSEN = "tool or environment or VLM or RolloutDispatch or no_reward_source"
DIFFERENT = {  # tests that pass with TRL's trainer and not with ours, and why
    "TestGRPOTrainer.test_train_with_environment_factory": "at n = 2m the environments are those of the kept rows",
}

# -- stand-ins ------------------------------------------------------------------------------------------------------

# Qwen's special tokens in the order of their ids, then those that are not removed from text.
SPECIAL = "endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start quad_end vision_start"
SPECIAL += " vision_end vision_pad image_pad video_pad"
TAGS = "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
TAGS += " <tool_response> </tool_response> <think> </think>"
# Qwen3.5's vocabulary is another: its first special token, and the tokens that a test names by their ids.
QWEN3_5 = 248044, {
    "function": 1628, "=s": 13744, "creenshot": 30091, "_tool": 22076, "</": 510, "Ġdon": 1459, "'t": 914,
    "Ġknow": 1366, "Ġany": 866, "Ġtool": 5224, "Done": 16936,
}  # fmt: skip
SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4}
SMALL |= {"num_key_value_heads": 1, "initializer_range": 0.2, "tie_word_embeddings": True, "num_labels": 1}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
TEXT: dict[str, tuple[str, str, dict[str, int]]] = {  # name: kind, chat template, further settings
    "Qwen2ForCausalLM-2.5": ("qwen2", "qwen2_5", {}),
    "Qwen2ForSequenceClassification-2.5": ("qwen2", "qwen2_5", {}),
    "Qwen3ForCausalLM": ("qwen3", "qwen3", {}),
    "Qwen3ForSequenceClassification": ("qwen3", "qwen3", {}),
    "Cohere2ForCausalLM": ("cohere2", "qwen2_5", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "qwen3", EXPERTS | {"num_experts": 4}),
    "Glm4MoeForCausalLM": ("glm4_moe", "qwen3", EXPERTS | {"n_routed_experts": 4}),
    "GptOssForCausalLM": ("gpt_oss", "qwen3", EXPERTS | {"num_local_experts": 4}),
}
VARIANT = {"Qwen3_5": "-NoThink", "Qwen3_5Moe": "-3.6"}
IMAGES = {
    f"{HUB}/tiny-{family}ForConditionalGeneration{VARIANT.get(family, '')}": family
    for family in ("Gemma3", "Gemma4", "LlavaNext", "Qwen2_5_VL", "Qwen2VL", "Qwen3_5", "Qwen3_5Moe")
}
WHOLE = "standard_prompt_only"  # the data of which a test names many rows; of others two are enough


def qwen_tokenizer(template: str, first: int = 0, moved: dict[str, int] | None = None) -> Any:
    """Qwen's tokenizer; with special tokens from the id `first` on, and some tokens at other ids."""
    sys.path.append(str(SITE))  # tiktoken
    converter = TikTokenConverter(vocab_file=str(SITE / "dashscope/resources/qwen.tiktoken"))
    converter.pattern = converter.pattern.replace(r"\p{N}{1,3}", r"\p{N}")
    ids, merges = converter.extract_vocab_merges_from_model(converter.vocab_file)
    names = {number: token for token, number in ids.items()}
    for token, to in (moved or {}).items():
        other, start = names[to], ids[token]
        ids |= {token: to, other: start}
        names |= {to: token, start: other}
    ids |= {f"<unused {number}>": number for number in range(len(ids), first)}
    converter.extract_vocab_merges_from_model = lambda _: (ids, merges)
    backend = converter.converted()
    backend.add_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in SPECIAL.split()])
    backend.add_tokens([AddedToken(name, normalized=False) for name in TAGS.split()])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", image_token="<|image_pad|>",
        video_token="<|video_pad|>", chat_template=getattr(chat_template_utils, f"{template}_chat_template"),
    )  # fmt: skip


def vision_model(family: str) -> tuple[Any, Any]:
    """Our tiny vision-language model and its processor; Qwen3.5's has the tokens and the template that a test needs."""
    model, processor = vision.make_vlm(family)
    if family == "Qwen3_5":
        tokenizer = qwen_tokenizer("qwen3_5_nothink", *QWEN3_5)
        with mock.patch.object(vision, "make_tokenizer", return_value=tokenizer):
            model, processor = vision.make_vlm(family)
        processor.chat_template = tokenizer.chat_template
    processor.save_pretrained = lambda *_, **__: []  # it has no part for videos, and cannot be saved
    return model, processor


def build_models() -> None:
    """Save a model and its tokenizer under each name; processors of images are made when they are asked for."""
    for name, (kind, template, more) in TEXT.items():
        tokenizer = qwen_tokenizer(template)
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
        config = transformers.AutoConfig.for_model(kind, vocab_size=len(tokenizer), **SMALL | more | ends)
        transformers.set_seed(7)
        getattr(transformers, name.partition("-")[0])(config).save_pretrained(f"{HUB}/tiny-{name}")
        tokenizer.save_pretrained(f"{HUB}/tiny-{name}")
    for folder, family in IMAGES.items():
        vision_model(family)[0].save_pretrained(folder)


def build_data(clone: Path) -> None:
    """Have the clone's own scripts make the data sets, and save rows of them in folders in place of the hub."""
    cards: dict[str, list[str]] = {}

    def save(data: Any, repo: str, config_name: str) -> None:
        Path(repo, config_name).mkdir(parents=True, exist_ok=True)
        card = f"- config_name: {config_name}\n  data_files:\n"
        for split, rows in data.items():
            few = rows.select(range(len(rows) if config_name == WHOLE else 2))
            few.to_parquet(f"{repo}/{config_name}/{split}.parquet")
            card += f"  - split: {split}\n    path: {config_name}/{split}.parquet\n"
        cards.setdefault(repo, []).append(card)

    with mock.patch.object(DatasetDict, "push_to_hub", save):
        for name in ("zen", "zen_image", "zen_multi_image"):
            script = runpy.run_path(str(clone / f"scripts/generate_{name}_dataset.py"))
            script["main"](0.1, True, f"{HUB}/{name.replace('_', '-')}")
    for repo, configurations in cards.items():
        Path(repo, "README.md").write_text(f"---\nconfigs:\n{''.join(configurations)}---\n", encoding="utf-8")


# -- the plug-in: what replaces what in TRL's tests -----------------------------------------------------------------


def by_halves(generate: Callable[..., Any]) -> Callable[..., Any]:
    """A test's fake generator of m rows for each prompt, asked for each half of a prompt's 2m."""

    def both(input_ids: Any, **_: Any) -> Any:
        prompts = len({tuple(row) for row in input_ids.tolist()})
        half = torch.arange(len(input_ids)) // max(len(input_ids) // (2 * prompts), 1) % 2
        order = half.argsort(stable=True)
        return torch.cat([generate(input_ids=rows) for rows in input_ids[order].chunk(2)])[order.argsort()]

    return both


class Config(PODSConfig):
    """Stands in for `GRPOConfig`: n is m, exactly as TRL, or 2m, with all that we do by default."""

    def __post_init__(self) -> None:
        self.num_rollouts, self.exact_trl = TIMES * self.num_generations, TIMES == 1
        super().__post_init__()


class Trainer(PODSTrainer):
    def _generate(self, prompts: list[Any]) -> Any:
        is_built = hasattr(self, "_update")  # some tests make a bare trainer, without its constructor
        return super()._generate(prompts) if is_built else trl.GRPOTrainer._generate(self, prompts)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if TIMES == 2 and (fake := getattr(self.model.generate, "side_effect", None)):
            self.model.generate.side_effect = by_halves(fake)
        return super().train(*args, **kwargs)


def pytest_configure() -> None:
    """Let an installed TRL of another version say that it does not know what the tests may use."""
    for name in re.findall(r"is_\w+_available", Path("trl_tests/testing_utils.py").read_text(encoding="utf-8")):
        vars(import_utils).setdefault(name, lambda **_: False)


def pytest_collection_finish(session: Any) -> None:
    """Give TRL's test module our processors, and our trainer and configuration."""
    load, module = transformers.AutoProcessor.from_pretrained, session.items[0].module

    def processor(name: Any, *args: Any, **settings: Any) -> Any:
        return vision_model(IMAGES[name])[1] if name in IMAGES else load(name, *args, **settings)

    transformers.AutoProcessor.from_pretrained = processor
    module.GRPOTrainer.eos_token_ids = [2]  # which TRL's tests of a bare trainer lack if they are older than TRL
    if TIMES:
        module.GRPOTrainer, module.GRPOConfig = Trainer, Config
    # A CPU computes bf16, TRL's default, slowly; further epochs see the same rows.
    module.GRPOConfig = partial(module.GRPOConfig, bf16=False, num_train_epochs=1)


# -- the command ----------------------------------------------------------------------------------------------------


def run(mode: str, chosen: str) -> dict[str, tuple[str, str]]:
    """Run TRL's tests in a process; return of each its outcome (passed, skipped, failure, error) and what it said."""
    report = Path(f"{mode.replace(' ', '')}.xml")
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{SITE}", "HF_DATASETS_CACHE": "cache", "HF_HUB_OFFLINE": "1"}
    paths |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}  # large arrays come from the same pages
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", "-p", "tests.trl_own"]
    command += ["-k", chosen, "--junitxml", str(report), f"trl_tests/{TESTS}.py"]
    done = subprocess.run(command, env=os.environ | paths | {"TRL_OWN_MODE": mode}, text=True, capture_output=True)
    report.with_suffix(".log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode > 1:
        raise SystemExit(f"{mode}: pytest ended with {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    found = {}
    for case in Tree.parse(report).iter("testcase"):
        word, said = ("passed", "") if not len(case) else (case[0].tag, case[0].get("message", "").partition("\n")[0])
        found[f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"] = (word, said)
    return found


def main(clone: Path, chosen: str = CHOSEN) -> int:
    """Build the stand-ins where they are missing, run the tests in each mode, print a table and what differs."""
    if not (clone / "tests" / f"{TESTS}.py").exists():
        raise SystemExit(f"{clone}/tests/{TESTS}.py does not exist: set TRL to the folder of a clone of TRL.")
    version = (clone / "VERSION").read_text(encoding="utf-8").strip()
    if version != trl.__version__:
        print(
            f"These tests are those of TRL {version}, and TRL {trl.__version__} is installed: some may fail for that."
        )
        print(f"For its own tests: git clone --branch v{trl.__version__} https://github.com/huggingface/trl")
    os.chdir(WORK)
    shutil.rmtree("trl_tests", ignore_errors=True)
    shutil.copytree(clone / "tests", "trl_tests", ignore=lambda _, names: {*names} - NEEDED)
    if not Path(HUB, "ready").exists():
        build_data(clone)
        build_models()
        Path(HUB, "ready").touch()
    found = {mode: run(mode, chosen) for mode in MODES}
    print(f"| test | {' | '.join(MODES)} |\n|{'---|' * (len(MODES) + 1)}")
    for name in dict.fromkeys(test.partition("[")[0] for test in found["TRL"]):
        tests = [test for test in found["TRL"] if test.partition("[")[0] == name]
        counts = [Counter(outcomes[test][0] for test in tests) for outcomes in found.values()]
        print(f"| `{name}` | {' | '.join(', '.join(f'{n} {word}' for word, n in count.items()) for count in counts)} |")
    passing = [test for test, (word, _) in found["TRL"].items() if word == "passed"]
    worse = [test for test in passing if {outcomes[test][0] for outcomes in found.values()} != {"passed"}]
    print(f"\n{len(passing)} tests pass with TRL's trainer. With ours:", "all but these." if worse else "all of them.")
    for test in worse:
        print(f"- {test}: {DIFFERENT.get(test) or [outcomes[test][1] for outcomes in found.values()]}")
    for test, (word, said) in found["TRL"].items():
        if word != "passed":
            print(f"- {word} with TRL's trainer: {test}: {said}")
    if not passing:
        print("No test passes with TRL's own trainer: the logs in build/trl-own say why.")
    return int(not passing or not {*worse} <= DIFFERENT.keys())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), *sys.argv[2:3]))
