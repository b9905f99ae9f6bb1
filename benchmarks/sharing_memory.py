"""Memory of the update by how much rollouts share: python benchmarks/sharing_memory.py [--csv FILE]

Answers why one should select, if shared prefixes make 16 rows cheap: the peak of the tensors in one pass forward and
backward for TRL's rows of GRPO 4, and for trees of 4 and of 16 rows, with the shipped policy and random completions,
which share only their prompt. The share is that of the tokens of 16 rows which their tree does not compute.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from measuring import command_line, set_up_torch, tensor_peak, write_csv
from pods_rl.policies import tiny_policy_path
from update import arms_of, one_pass, random_rows

MANY = 16
FEW = 4
CASES = ((200, 10), (200, 30), (60, 30), (60, 120), (60, 300), (60, 1000))  # tokens of the prompt and of completions
COLUMNS = ("prompt", "completion", "shared", "trl_4_mb", "tree_4_mb", "tree_16_mb")


def shared(prompt: int, completion: int) -> float:
    """Return the share of the tokens of 16 rows that their tree does not compute."""
    return (MANY - 1) * prompt / (MANY * (prompt + completion))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    set_up_torch(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_policy_path()).float().train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    arms = arms_of(model)
    lines = []
    print(f"{'prompt + completion':<22}{'shared':>8}{'TRL 4':>10}{'tree 4':>10}{'tree 16':>10}  of TRL 4")
    for prompt, completion in CASES:
        peaks = []
        for arm, rows in (("rows", FEW), ("tree", FEW), ("tree", MANY)):
            batch = random_rows(prompt, completion, rows=rows)
            model.zero_grad(set_to_none=False)  # gradients of the weights are held before, in all arms
            one_pass(arms[arm](batch), batch)
            peaks.append(tensor_peak(partial(one_pass, arms[arm](batch), batch)) / 1e6)
        share = shared(prompt, completion)
        columns = "".join(f"{peak:>7.1f} MB" for peak in peaks)
        print(f"{f'{prompt} + {completion}':<22}{share:>8.0%}{columns}{peaks[2] / peaks[0]:>10.2f}", flush=True)
        lines.append([prompt, completion, f"{share:.3f}", *(f"{peak:.1f}" for peak in peaks)])
    write_csv(options.csv, COLUMNS, lines)


if __name__ == "__main__":
    main()
