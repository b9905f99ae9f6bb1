"""PODS in a plain PyTorch loop, on the shipped policy and task: python examples/plain_loop.py (seconds on a CPU)."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pods_rl import advantages, pods_objective, select
from pods_rl.policies import tiny_policy_path
from pods_rl.rewards import get_reward
from pods_rl.tasks import load_task

STEPS, P, N, M, T = 10, 2, 32, 8, 56  # steps, prompts per step, generated and kept per prompt, maximum tokens
torch.manual_seed(0)
task = load_task({"task": "arithmetic", "task_difficulty": "easy"})
tokenizer = AutoTokenizer.from_pretrained(tiny_policy_path(), padding_side="left")
policy = AutoModelForCausalLM.from_pretrained(tiny_policy_path())
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
weights = {get_reward(name): weight for name, weight in task.rewards.items()}


def generate(prompts_P):
    """Generate n completions per prompt: prompt and completion ids [P * N, L + T], prompt length L, and texts."""
    inputs = tokenizer([prompt for prompt in prompts_P for _ in range(N)], return_tensors="pt", padding=True)
    rows = policy.generate(**inputs, do_sample=True, max_new_tokens=T)
    length = inputs["input_ids"].shape[1]
    return rows, length, tokenizer.batch_decode(rows[:, length:], skip_special_tokens=True)


def score(texts, answers_P):
    """Return the weighted sum of the task's rewards, [P, N]."""
    golds = [answer for answer in answers_P for _ in range(N)]
    total = sum(weight * torch.tensor(reward.batch(texts, golds)) for reward, weight in weights.items())
    return total.view(P, N)


def log_probs(rows, length):
    """Return the log-probability of each completion token, [rows, T], and a mask that is 1 up to its end."""
    attention = (rows != tokenizer.pad_token_id).long()
    positions = (attention.cumsum(dim=1) - 1).clamp(min=0)
    logits = policy(rows, attention_mask=attention, position_ids=positions).logits[:, length - 1 : -1]
    tokens = rows[:, length:]
    return logits.log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1), attention[:, length:]


for step in range(STEPS):
    batch = task.train[step * P : (step + 1) * P]
    with torch.no_grad():
        rows, length, texts = generate(batch["prompt"])
    rewards = score(texts, batch["answer"])  # [P, N]
    kept = select(rewards, M, rule="max_variance")  # PODS
    advantage = advantages(rewards, kept)  # [P, M], normalised over the kept rewards
    chosen = (kept.indices + torch.arange(P)[:, None] * N).flatten()
    logps, mask = (values.view(P, M, -1) for values in log_probs(rows[chosen], length))
    loss = pods_objective(logps, logps.detach(), advantage, mask)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    print(f"step {step + 1}: reward {rewards.mean():.3f} over {P * N}, trained on {P * M} rows")
