"""Images: the real trainer over a tiny model of each family, and rows whose tensors of images stay their own."""

from __future__ import annotations

import copy
import importlib.resources
from functools import cache

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from pods_rl import PODSConfig, PODSTrainer
from pods_rl.engines.trl.packing import chosen_inputs, present_images, sort_windows, trimmed_passes

from .conftest import letter_reward
from .test_update_rows import Gradients
from .vision import FAMILIES, make_vlm, picture

NO_TORCHVISION = pytest.mark.skip(reason="transformers has its image processor only with torchvision")
IMAGES_A_ROW = [1, 2, 1, 3]


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


def train(tmp_path, family, trainer_class=PODSTrainer, config_class=PODSConfig, **config):
    """The gradient of one step, and the trainer."""
    model, processor = family_of(family)
    settings = {
        "num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1,
        "max_completion_length": 6, "learning_rate": 1e-3, "max_grad_norm": 0.0, "optim": "sgd", "seed": 3,
        "loss_type": "grpo", "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "disable_tqdm": True,
        "report_to": "none", "save_strategy": "no", "logging_steps": 1,
    }  # fmt: skip
    trainer = trainer_class(
        model=copy.deepcopy(model),
        reward_funcs=half_constant,
        args=config_class(str(tmp_path), **settings | config),
        train_dataset=pictures(),
        processing_class=processor,
    )
    watch = Gradients(trainer)
    trainer.add_callback(watch)
    trainer.train()
    return watch.steps[0], trainer


@pytest.mark.parametrize("family", [*FAMILIES, pytest.param("Lfm2Vl", marks=NO_TORCHVISION)])
def test_every_family_has_the_gradient_of_trl(tmp_path, family):
    """To the last bit with `exact_trl`; else up to rounding, with rows sorted, trimmed and left out."""
    theirs, _ = train(tmp_path, family, GRPOTrainer, GRPOConfig)
    exact, _ = train(tmp_path, family, num_rollouts=2, exact_trl=True)
    assert theirs.keys() == exact.keys()
    assert all(torch.equal(exact[name], theirs[name]) for name in theirs)
    ours, trainer = train(tmp_path, family, num_rollouts=2)
    dead = sum(int((batch["advantages"] == 0).sum()) for batch in trainer._buffered_inputs)
    assert dead >= 2
    assert trainer.state.log_history[0]["pods/rows/left_out"] == (0 if trainer.aux_loss_enabled else dead)
    size = torch.cat([gradient.flatten() for gradient in theirs.values()]).norm()
    assert size > 0
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name] / size, gradient / size, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "InternVL"])
def test_kept_rows_keep_their_images(tmp_path, family):
    """Each trained row has as many image tokens, and as many numbers of pixels, as its own images make."""
    _, trainer = train(tmp_path, family, num_rollouts=4, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert len(trainer.rollouts.completions) == 16
    token = trainer.model.config.image_token_id
    for batch in trainer._buffered_inputs:
        tokens = int((batch["prompt_ids"] == token).sum())
        pixels = batch["pixel_values"]
        assert tokens == (len(pixels) // 4 if family == "Qwen2_5_VL" else 4 * sum(batch["num_tiles"]))
        assert len(pixels) == (batch["image_grid_thw"].prod(-1).sum() if "num_tiles" not in batch else tokens // 4)


# -- rows of each layout ---------------------------------------------------------------------------------------------


def by_count(counts, rows):
    """A tensor with as many entries of each row's number as it has images, patches or tiles."""
    return torch.tensor(rows).repeat_interleave(torch.tensor([counts[row] for row in rows]))


def patches(rows):
    grids = {row: [[1, row + 1, 2]] * IMAGES_A_ROW[row] for row in rows}
    counts = {row: sum(h * w for _, h, w in grids[row]) for row in rows}
    grid = torch.tensor([image for row in rows for image in grids[row]])
    return {"pixel_values": by_count(counts, rows), "image_grid_thw": grid}


def images(rows, other=None):
    values = by_count(IMAGES_A_ROW, rows)
    return {"pixel_values": values} | ({other: values} if other else {})


def tiles(rows, *others):
    counts = [2 * row + 1 for row in range(4)]
    names = ("pixel_values", *others)
    return dict.fromkeys(names, by_count(counts, rows)) | {"num_tiles": [counts[row] for row in rows]}


LAYOUTS = {
    "patches": patches,
    "images": images,
    "images with positions": lambda rows: images(rows, "image_position_ids"),
    "images with sizes": lambda rows: images(rows, "image_sizes"),
    "tiles": tiles,
    "tiles with shapes": lambda rows: tiles(rows, "pixel_attention_mask", "spatial_shapes"),
    "rows": lambda rows: dict.fromkeys(("pixel_values", "pixel_attention_mask"), torch.tensor(rows)),
}


def inputs_of(layout, rows):
    return LAYOUTS[layout](rows) | {
        "num_images": [IMAGES_A_ROW[row] for row in rows],
        "mm_token_type_ids": torch.tensor(rows).unsqueeze(1).expand(-1, 5),
    }


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sorting_moves_images_with_their_rows(layout):
    lengths = {3: 4, 0: 1, 2: 3, 1: 2}
    mask = torch.arange(4) < torch.tensor(list(lengths.values())).unsqueeze(1)
    before = [list(lengths)[:2], list(lengths)[2:]]
    batches = [
        inputs_of(layout, rows) | {"completion_ids": mask[at : at + 2], "completion_mask": mask[at : at + 2]}
        for at, rows in zip((0, 2), before, strict=True)
    ]
    for batch, rows in zip(sort_windows(batches, 2), ([0, 1], [2, 3]), strict=True):
        assert_same({name: batch[name] for name in inputs_of(layout, rows)}, inputs_of(layout, rows))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chosen_and_trimmed_rows_get_their_own_images(layout):
    rows = [2, 0, 3, 1]
    more = inputs_of(layout, rows)
    cut = inputs_of(layout, [3, 0])
    assert_same(
        chosen_inputs(more, torch.tensor([2, 1]), slice(1, 4)),
        cut | {"mm_token_type_ids": cut["mm_token_type_ids"][:, 1:4]},
    )
    seen = []

    def compute(ids, mask, keep, **own):
        assert own["mm_token_type_ids"].shape == mask.shape
        assert_same(own | {"mm_token_type_ids": 0}, inputs_of(layout, ids[:, 0].tolist()) | {"mm_token_type_ids": 0})
        seen.append(mask.size(1))
        return ids[:, -keep:].float(), None, None

    mask = torch.arange(5) < torch.tensor([[5], [3], [4], [3]])
    ids = torch.tensor(rows).unsqueeze(1).expand(-1, 5)
    scores = trimmed_passes(compute, ids, mask, 3, 2, left=False, more=more)[0]
    assert seen == [3, 5]
    assert scores[:, 0].tolist() == rows


def test_rows_without_images_are_text():
    """Sorting can gather rows without images, for which models refuse tensors of no image."""
    types = torch.zeros(1, 3)
    more = {"pixel_values": torch.zeros(0, 4), "num_images": [0], "mm_token_type_ids": types}
    assert present_images(more) == {"pixel_values": None, "num_images": None, "mm_token_type_ids": types}
    assert present_images(more | {"num_images": [1]})["pixel_values"] is more["pixel_values"]


# -- images that tools return ----------------------------------------------------------------------------------------


def screenshot() -> list:
    """Take a screenshot.

    Returns:
        The picture, and a word.
    """
    return [{"type": "image", "image": picture(24, 16, 5)}, {"type": "text", "text": "Here"}]


def train_with_screenshots(tmp_path, trainer_class, config_class, **config):
    """Every second rollout takes a screenshot; the gradient of one step."""
    model, processor = make_vlm("Qwen3_5")
    template = (importlib.resources.files("trl") / "chat_templates/qwen3_5_nothink.jinja").read_text()
    processor.chat_template = processor.tokenizer.chat_template = template
    tokenizer = processor.tokenizer
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    asked = []

    def turn(input_ids, **_):
        """Stands in for the policy's `generate`."""
        asked.append(len(input_ids))
        call = "<tool_call>\n<function=screenshot>\n</function>\n</tool_call><|im_end|>"
        texts = [call if len(asked) == 1 and row % 2 == 0 else "abcde"[: row % 5 + 1] + "<|im_end|>"
                 for row in range(len(input_ids))]  # fmt: skip
        rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        width = max(map(len, rows))
        return torch.cat(
            [input_ids, torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])], 1
        )

    settings = {
        "num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1,
        "max_completion_length": 200, "max_grad_norm": 0.0, "optim": "sgd", "seed": 3, "loss_type": "grpo",
        "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "disable_tqdm": True, "report_to": "none",
        "save_strategy": "no", "logging_steps": 1,
    }  # fmt: skip
    trainer = trainer_class(
        model=model,
        reward_funcs=lambda completions, **_: [
            len(turns) + len(str(turns[-1]["content"])) / 7 for turns in completions
        ],
        args=config_class(str(tmp_path), **settings | config),
        train_dataset=pictures().remove_columns("images").select(range(2)),
        processing_class=processor,
        tools=[screenshot],
    )
    watch = Gradients(trainer)
    trainer.add_callback(watch)
    trainer.model.generate = turn
    trainer.train()
    return watch.steps[0], asked, trainer.state.log_history[0]


def test_images_of_tools_follow_their_rows(tmp_path):
    theirs, turns, log = train_with_screenshots(tmp_path, GRPOTrainer, GRPOConfig)
    assert turns == [4, 2]
    assert log["tools/call_frequency"] == 0.5
    exact, _, _ = train_with_screenshots(tmp_path, PODSTrainer, PODSConfig, exact_trl=True)
    assert all(torch.equal(exact[name], gradient) for name, gradient in theirs.items())
    ours, _, _ = train_with_screenshots(tmp_path, PODSTrainer, PODSConfig)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6)
    _, turns, log = train_with_screenshots(tmp_path, PODSTrainer, PODSConfig, num_rollouts=4)
    assert turns == [8, 4]
    assert log["pods/tool_calls"] == 4
