"""Images: the real trainer over a tiny model of each family, and rows whose tensors of images stay their own."""

import copy
import importlib.resources
from functools import cache, partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import GenerationConfig, LogitsProcessorList, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.data_utils import prepare_multimodal_messages
from trl.trainer import grpo_trainer

from pods_rl import PODSConfig, PODSTrainer
from pods_rl.engines.trl.guarded.checkpoints import load_renamed
from pods_rl.errors import UserError
from pods_rl.prefix_tree.decoding import RowDraws, decode
from tests.numeric import FLOAT32, assert_near

from .conftest import Gradients, letter_reward
from .test_losses import fed, kept_rows
from .vision import FAMILIES, make_vlm, picture

pytestmark = pytest.mark.slow  # a model of each family
SETTINGS = {
    "num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1,
    "max_completion_length": 6, "learning_rate": 1e-3, "max_grad_norm": 0.0, "optim": "sgd", "seed": 3,
    "loss_type": "grpo", "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "disable_tqdm": True,
    "report_to": "none", "save_strategy": "no", "logging_steps": 1,
}  # fmt: skip

IMAGES_A_ROW = [1, 2, 1, 3]
# One of each layout of images: by patch, by image twice, by row, by tile.
LAYOUTS = ("Qwen2_5_VL", "Gemma3", "LlavaNext", "Idefics3", "InternVL")


@cache
def family_of(name):
    return make_vlm(name)


def pictures():
    """Four prompts of several lengths, with one to three images of several sizes."""
    drawn = iter([picture(20 + 4 * i, 32 - 4 * i, i) for i in range(sum(IMAGES_A_ROW))])
    questions = ["what?", "a", "what is it?", "how many are there?"]
    return Dataset.from_dict({
        "prompt": [[{"role": "user", "content": question}] for question in questions],
        "images": [[next(drawn) for _ in range(count)] for count in IMAGES_A_ROW],
    })  # fmt: skip


def half_constant(prompts, completions, **_):
    """The same for all completions of one prompt, so that its rows have no advantage."""
    letters = letter_reward([turns[-1]["content"] for turns in completions])
    dead = [prompt[0]["content"][-1]["text"] == "a" for prompt in prompts]
    return [0.5 if constant else reward for constant, reward in zip(dead, letters, strict=True)]


def build(tmp_path, family, trainer_class=PODSTrainer, config_class=PODSConfig, **given):
    """A trainer over a copy of the family's model, and the gradients of its steps."""
    model, processor = family_of(family)
    model, more = copy.deepcopy(model), {name: given.pop(name) for name in ("peft_config",) if name in given}
    model.config._name_or_path = given.pop("reference", None)
    set_seed(5)  # adapters are drawn
    trainer = trainer_class(
        model=model,
        reward_funcs=half_constant,
        args=config_class(str(tmp_path), **SETTINGS | given),
        train_dataset=pictures(),
        eval_dataset=pictures(),
        processing_class=processor,
        **more,
    )
    return trainer, Gradients(trainer).steps


def train(*given, **config):
    """The gradient of the last step, and the trainer."""
    trainer, gradients = build(*given, **config)
    trainer.train()
    return gradients[-1], trainer


@pytest.mark.parametrize("family", LAYOUTS)
def test_every_layout_has_the_gradient_of_trl(tmp_path, family):
    """To the last bit with `exact_trl`; by default up to rounding."""
    theirs, _ = train(tmp_path, family, GRPOTrainer, GRPOConfig)
    exact, _ = train(tmp_path, family, num_rollouts=2, exact_trl=True)
    assert theirs.keys() == exact.keys()
    assert all(torch.equal(exact[name], theirs[name]) for name in theirs)
    trainer, ours = build(tmp_path, family, num_rollouts=2)
    rows = kept_rows(trainer)
    trainer.train()
    oracle, theirs = build(tmp_path, family, GRPOTrainer, GRPOConfig)
    fed(oracle, rows).train()  # the default draws other tokens
    assert sum(int((batch["advantages"] == 0).sum()) for batch in trainer._buffered_inputs) >= 2
    assert not trainer.state.log_history[0].get("pods/rows/left_out")  # rows with images are computed as TRL does
    assert_near(ours[-1], theirs[-1], FLOAT32)


@pytest.mark.numeric
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_with_images_is_computed_once_and_its_rollouts_have_the_tokens_of_generate(family):
    """Rows with the same text and other images of the same size are other prompts; a row may have no image."""
    model, processor = family_of(family)
    model = copy.deepcopy(model).eval()
    same_size = [picture(24, 24, seed) for seed in (1, 2)]
    prompts = [("what?", same_size[:1]), ("what?", same_size[1:]), ("both?", same_size), ("none?", [])]
    messages = [prepare_multimodal_messages([{"role": "user", "content": text}], seen) for text, seen in prompts * 4]
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": "left"},
    )  # fmt: skip
    inputs = {name: value for name, value in inputs.items() if name != "num_patches"}
    inputs["generation_config"] = GenerationConfig(
        max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=model.generation_config.eos_token_id
    )
    width = inputs["input_ids"].size(1)

    def draws():
        return RowDraws([(7, row) for row in range(len(messages))], 10, prompt_width=width)

    expected = model.generate(**inputs, logits_processor=LogitsProcessorList([draws()]))
    seen = []
    note = lambda _, __, given: seen.append(tuple(given["input_ids"].shape))  # noqa: E731
    model.register_forward_pre_hook(note, with_kwargs=True)
    assert torch.equal(model.generate(**inputs, custom_generate=partial(decode, draws())), expected)
    assert seen[0] == (len(prompts), width)
    assert len({tuple(row) for row in expected.tolist()}) > 2 * len(prompts)


@pytest.mark.parametrize(
    ("family", "setting"),
    [("Qwen2_5_VL", "adapter and its reference"), ("InternVL", "reference"), ("InternVL", "twice")],
)
def test_m_of_n_have_the_gradient_of_trl_on_those_m(tmp_path, monkeypatch, family, setting):
    """TRL's own trainer is fed the kept rows; `reference`: another model on the disk, `twice`: ratios other than 1."""
    config = {"beta": 0.1} if "reference" in setting else {}
    if setting == "twice":
        config |= {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 2}
    if "adapter" in setting:
        config["peft_config"] = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    elif "reference" in setting:
        other = copy.deepcopy(family_of(family)[0])
        torch.manual_seed(9)
        for weight in other.parameters():
            weight.data += 0.02 * torch.randn_like(weight)
        other.save_pretrained(tmp_path / "reference")
        config["reference"] = str(tmp_path / "reference")
    trainer, ours = build(tmp_path, family, num_rollouts=4, **config)
    rows = kept_rows(trainer)
    trainer.train()
    oracle, theirs = build(tmp_path, family, GRPOTrainer, GRPOConfig, **config)
    fed(oracle, rows).train()
    assert_near(ours[-1], theirs[-1], FLOAT32)
    assert ("reference" in setting) == (trainer.state.log_history[0].get("kl", 0) > 0.01)


def rows_with_own_images(trainer, batch):
    """Return each row's question and completion; its tokens and pixels are those that TRL makes of it alone."""
    rows, questions = grpo_trainer.split_pixel_values_by_grid(batch), []
    for ids, mask, pixels in zip(batch["prompt_ids"], batch["prompt_mask"], rows["pixel_values"], strict=True):
        own = ids[mask == 1].tolist()
        (row,) = [row for row in pictures() if f">{row['prompt'][0]['content']}<" in trainer._tokenizer.decode(own)]
        prompt_ids, _, fields = trainer._tokenize_prompts([prepare_multimodal_messages(row["prompt"], row["images"])])
        assert own == prompt_ids[0]
        assert torch.equal(pixels, torch.tensor(np.array(fields["pixel_values"])))
        questions.append(row["prompt"][0]["content"])
    own = [ids[mask == 1] for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)]
    return list(zip(questions, trainer.processing_class.batch_decode(own, skip_special_tokens=True), strict=True))


KEPT = {
    "new prompts": {"num_rollouts": 3, "dynamic_sampling": True, "dynamic_sampling_rounds": 1},
    "over the batch": {"num_rollouts": 4, "selection": "batch"},
}


@pytest.mark.parametrize(("family", "setting"), [("InternVL", "new prompts"), ("Qwen2_5_VL", "over the batch")])
def test_kept_rows_keep_their_images(tmp_path, family, setting):
    layout = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    _, trainer = train(tmp_path, family, **layout | KEPT[setting])
    record, n = trainer.rollouts, KEPT[setting]["num_rollouts"]
    log, generated = trainer.state.log_history[0], len(record.completions)
    further = log.get("pods/dynamic_sampling/prompts_drawn", 0.0)
    assert (further > 0) == (setting == "new prompts")
    assert generated == (4 + further) * n
    place = {number: i for i, number in enumerate(record.numbers)}
    kept = [place[number] for number in record.kept.tolist()]
    asked = [(record.inputs[i]["prompt"][0]["content"], record.completions[i][0]["content"]) for i in kept]
    trained = [row for batch in trainer._buffered_inputs for row in rows_with_own_images(trainer, batch)]
    assert sorted(trained) == sorted(asked)


@pytest.mark.parametrize("family", LAYOUTS)
def test_a_checkpoint_s_weights_are_loaded_whatever_their_names(tmp_path, family):
    """transformers saves many families under other names than the model's, and its trainer skips what it misses."""
    trainer, _ = build(tmp_path, family)
    model, folder = trainer.model, tmp_path / "saved"
    model.save_pretrained(folder)
    saved = {name: weight.clone() for name, weight in model.state_dict().items()}
    for weight in model.parameters():
        weight.data += 1
    trainer._load_from_checkpoint(str(folder))  # transformers': it loads what has the model's own names
    load_renamed(trainer, str(folder))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, saved[name]), name


def test_rows_with_images_cannot_be_split(tmp_path):
    with pytest.raises(UserError, match=r"rollout_batch_size .*\b3, .*\b16 "):
        train(tmp_path, "Qwen2_5_VL", num_rollouts=4, rollout_batch_size=3)


# -- images that tools return ----------------------------------------------------------------------------------------


def screenshot() -> list:
    """Take a screenshot.

    Returns:
        The picture, and a word.
    """
    return [{"type": "image", "image": picture(24, 16, 5)}, {"type": "text", "text": "Here"}]


def word() -> str:
    """Say a word.

    Returns:
        The word.
    """
    return "There"


def train_with_screenshots(tmp_path, trainer_class, config_class, **config):
    """Every fourth rollout takes a screenshot, every fourth asks for a word; the gradient of one step."""
    model, processor = make_vlm("Qwen3_5")
    template = (importlib.resources.files("trl") / "chat_templates/qwen3_5_nothink.jinja").read_text()
    processor.chat_template = processor.tokenizer.chat_template = template
    tokenizer = processor.tokenizer
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    asked, said = [], {True: 0, False: 0}

    def say(ids, images):
        """The turn of a row, by its number among the first turns or among the others."""
        first = "<tool_response>" not in tokenizer.decode(ids)
        number = said[first]
        said[first] += 1
        images.append(int((ids == model.config.image_token_id).sum()))
        called = ("screenshot", None, "word", None)[number % 4]
        if first and called:
            return f"<tool_call>\n<function={called}>\n</function>\n</tool_call><|im_end|>"
        return "abcde"[: number % 5 + 1] + "<|im_end|>"

    def turn(input_ids, **inputs):
        """Stands in for the policy's `generate`."""
        images = []
        rows = [tokenizer(say(ids, images), add_special_tokens=False)["input_ids"] for ids in input_ids]
        asked.append((len(rows), sum(map(bool, images))))
        assert sum(images) == len(inputs.get("pixel_values", [])) // 4
        assert "token_type_ids" not in inputs  # which this family does not take
        width = max(map(len, rows))
        return torch.cat(
            [input_ids, torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])], 1
        )

    trainer = trainer_class(
        model=model,
        reward_funcs=lambda completions, **_: [
            len(turns) + len(str(turns[-1]["content"])) / 7 for turns in completions
        ],
        args=config_class(
            str(tmp_path), **SETTINGS | {"per_device_train_batch_size": 2, "max_completion_length": 200} | config
        ),
        train_dataset=pictures().remove_columns("images").select(range(2)),
        processing_class=processor,
        tools=[screenshot, word],
    )
    watch = Gradients(trainer)
    trainer.model.generate = turn
    trainer.train()
    return watch.steps[0], asked, trainer.state.log_history[0]


def test_images_of_tools_follow_their_rows(tmp_path):
    # TRL fails on a micro-batch without an image
    whole = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    theirs, turns, log = train_with_screenshots(tmp_path, GRPOTrainer, GRPOConfig, **whole)
    assert turns == [(4, 0), (2, 1)]
    assert log["tools/call_frequency"] == 0.5
    exact, _, _ = train_with_screenshots(tmp_path, PODSTrainer, PODSConfig, exact_trl=True, **whole)
    assert all(torch.equal(exact[name], gradient) for name, gradient in theirs.items())
    ours, turns, _ = train_with_screenshots(tmp_path, PODSTrainer, PODSConfig)
    assert turns == [(4, 0), (2, 1)]
    assert_near(ours, theirs, FLOAT32)
    _, turns, log = train_with_screenshots(tmp_path, PODSTrainer, PODSConfig, num_rollouts=4)
    assert turns == [(8, 0), (4, 2)]
