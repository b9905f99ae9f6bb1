"""A TRL script for GRPO, changed to PODS: two imports, two names and one new argument. Comments show the old lines.

    python examples/trl_script.py        # the shipped policy trains on sums; half a minute on one CPU core

Needs: pods-rl. For your own script, put your model, data and rewards in their places: all of TRL's options stay.
"""

import random
import re

from datasets import Dataset

from pods_rl import PODSConfig, PODSTrainer  # from trl import GRPOConfig, GRPOTrainer
from pods_rl.policies import tiny_policy_path

STEPS = 20


def reward(completions, answer, **columns):
    """1 for the right answer, as TRL calls it: a list of completions, and the data set's columns."""
    found = [re.findall(r"<answer>(.*?)</answer>", completion) for completion in completions]
    return [float(bool(answers) and answers[-1] == gold) for answers, gold in zip(found, answer, strict=True)]


draw = random.Random(0)
sums = [(draw.randint(10, 49), draw.randint(10, 50)) for _ in range(1000)]
dataset = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a, b in sums], "answer": [str(a + b) for a, b in sums]})

args = PODSConfig(  # args = GRPOConfig(
    output_dir="runs/trl-script",
    num_generations=8,  # the rows trained on per prompt, as in TRL
    num_rollouts=32,  # new: the rollouts generated per prompt
    loss_type="grpo",  # the paper's; TRL's default is "dapo"
    per_device_train_batch_size=8,
    max_completion_length=56,
    learning_rate=1e-4,
    max_steps=STEPS,
    logging_steps=5,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = PODSTrainer(  # trainer = GRPOTrainer(
    model=str(tiny_policy_path()),
    reward_funcs=reward,
    args=args,
    train_dataset=dataset,
)
trainer.train()
