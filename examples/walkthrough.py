"""One training step, stage by stage, with the file and the line of each (10 seconds on a CPU, nothing is downloaded).

    python examples/walkthrough.py              # the shipped policy on sums
    python examples/walkthrough.py --replay     # trains on the rollouts of the last call again

The trainer below is a subclass of PODSTrainer. Each of its methods calls the original and prints the result. To change
a stage of your own training, override the same method.
"""

import argparse
import inspect
import json
import warnings
from pathlib import Path

import torch
from transformers import PrinterCallback

from pods_rl import PODSConfig, PODSTrainer
from pods_rl.engines.trl.selecting.advantages import set_advantages
from pods_rl.policies import tiny_policy_path
from pods_rl.prefix_tree.decoding import complete
from pods_rl.rewards import get_reward
from pods_rl.selection import select_batch
from pods_rl.tasks import load_task

ROLLOUTS = Path("runs/walkthrough/rollouts.json")
REPOSITORY = Path(__file__).parents[1]


def stage(title, function):
    """Print the title of a stage, and where its work is done."""
    function = inspect.unwrap(function)
    file = Path(inspect.getsourcefile(function))
    if file.is_relative_to(REPOSITORY):
        file = file.relative_to(REPOSITORY)
    print(f"\n{title}\n  {function.__qualname__}, {file}:{function.__code__.co_firstlineno}")


def accuracy(completions, answer, **columns):
    """1 for the right answer, as TRL calls it: a list of completions, and the data set's columns."""
    return get_reward("accuracy").batch(completions, answer)


class Walkthrough(PODSTrainer):
    """PODSTrainer that prints each stage of a step.

    Args:
        replayed: completions that are trained instead of new ones, a list of tokens for each rollout.
    """

    def __init__(self, *args, replayed=None, **named):
        super().__init__(*args, **named)
        self.replayed = replayed
        self.batch = None

    def _generate_single_turn(self, prompt_ids, *args, **named):
        stage(f"1. Rollouts: {self.args.num_rollouts} for each of {self.args.num_prompts} prompts", complete)
        if self.replayed is None:
            completion_ids, log_probs = super()._generate_single_turn(prompt_ids, *args, **named)
            ROLLOUTS.parent.mkdir(parents=True, exist_ok=True)
            ROLLOUTS.write_text(json.dumps(completion_ids))
            print(f"  saved in {ROLLOUTS}")
        else:
            completion_ids, log_probs = self.replayed, None
            print(f"  read from {ROLLOUTS}")
        n = self.args.num_rollouts
        for first in range(0, len(prompt_ids), n):
            text = self.processing_class.decode(completion_ids[first], skip_special_tokens=True)
            print(f"  {self.processing_class.decode(prompt_ids[first])} ... {text[-48:]!r}")
        return completion_ids, log_probs

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids)
        stage("2. Rewards: one of each rollout and reward function", accuracy)
        for number, of_prompt in enumerate(rewards[:, 0].view(-1, self.args.num_rollouts).tolist()):
            print(f"  prompt {number}: {' '.join(f'{reward:.0f}' for reward in of_prompt)}")
        return rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        record = self.rollouts
        sizes = record.sizes().tolist()
        stage(f"3. Selection: the {len(record.kept)} rows of all prompts whose rewards differ most", select_batch)
        for number, size in enumerate(sizes):
            rewards = record.rewards[number]
            if size == 0:
                why = "all rewards are equal, so nothing can be learned" if rewards.std() == 0 else "others differ more"
                print(f"  prompt {number}: no row; {why}")
                continue
            kept = record.kept[record.kept // self.args.num_rollouts == number] % self.args.num_rollouts
            right = int(rewards[kept].sum())
            print(
                f"  prompt {number}: {size} rows, {right} right and {size - right} wrong, of {int(rewards.sum())} right"
            )
        stage(
            "4. Advantages: each reward less the mean of its prompt's kept rows, over their deviation", set_advantages
        )
        trained = [number for number, size in enumerate(sizes) if size]
        for number, advantages in zip(trained, record.by_group(record.advantages), strict=True):
            values = sorted({round(value, 2) for value in advantages[~advantages.isnan()].tolist()})
            print(f"  prompt {number}: {', '.join(f'{value:+.2f}' for value in values)}")
        self.batch = batch
        self.before = self.kept_log_probs()
        return batch

    @torch.no_grad()
    def kept_log_probs(self):
        """Return the log-probability of each kept completion under the policy as it is now."""
        batch = self.batch
        tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = self.model(tokens, attention_mask=mask, position_ids=positions).logits
        length = batch["completion_ids"].size(1)
        of_tokens = logits[:, -length - 1 : -1].log_softmax(dim=-1).gather(-1, batch["completion_ids"].unsqueeze(-1))
        return (of_tokens.squeeze(-1) * batch["completion_mask"]).sum(dim=1)


def main():
    warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replay", action="store_true", help=f"train on the rollouts in {ROLLOUTS}")
    options = parser.parse_args()
    args = PODSConfig(
        output_dir="runs/walkthrough",
        num_prompts=4,
        num_rollouts=16,
        selection="batch",
        num_generations=4,  # rows of a prompt, on average
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,  # 4 x 4 = 16 rows per step
        max_completion_length=56,
        loss_type="grpo",
        learning_rate=1e-4,
        max_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Walkthrough(
        model=str(tiny_policy_path()),
        reward_funcs=accuracy,
        args=args,
        train_dataset=load_task({"task": "arithmetic", "task_difficulty": "mixed"}).train,
        replayed=json.loads(ROLLOUTS.read_text()) if options.replay else None,
    )
    trainer.remove_callback(PrinterCallback)  # prints all metrics
    trainer.train()
    stage("5. Update: distinct prefixes in as few passes as have room, forward and backward", PODSTrainer._compute_loss)
    batch = trainer.batch
    of_rows = int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())
    (metrics,) = [row for row in trainer.state.log_history if "reward" in row]
    print(f"  the rows have {of_rows} tokens, of which {metrics['pods/tokens/computed']:.0f} were computed")
    stage("6. What changed: the log-probability of kept rollouts, on average", PODSTrainer.training_step)
    change = trainer.kept_log_probs() - trainer.before
    advantages = batch["advantages"]
    print(f"  right ones {change[advantages > 0].mean():+.3f}, wrong ones {change[advantages < 0].mean():+.3f}")


if __name__ == "__main__":
    main()
