"""8 prompts x 8 rows on one GPU: PODS over the batch, LoRA, and vLLM in the same process.

    python examples/one_gpu.py        # without a GPU: the shipped policy on sums, without vLLM; half a minute

Needs: pip install '.[vllm]' in a checkout, one GPU of 24 GB, GSM8K from the hub. Not yet run on a GPU by us. The same
as a recipe: pods train --config gsm8k-8x8
"""

import torch
from peft import LoraConfig

from pods_rl import PODSConfig, PODSTrainer
from pods_rl.policies import tiny_policy_path
from pods_rl.rewards import get_reward
from pods_rl.tasks import load_task

ON_A_GPU = torch.cuda.is_available()
STEPS = 500 if ON_A_GPU else 2

task = load_task({"task": "gsm8k" if ON_A_GPU else "arithmetic"})


def accuracy(completions, answer, **columns):
    """1 for the right answer. A chat's completion is a list of messages."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return get_reward("accuracy").batch(texts, answer)


args = PODSConfig(
    output_dir="runs/one-gpu",
    num_rollouts=32,  # generated per prompt
    num_generations=8,  # trained per prompt, on average
    selection="batch",  # over all prompts of a step
    per_device_train_batch_size=8,
    gradient_accumulation_steps=8,  # 8 x 8 rows / 8 = 8 prompts per step
    max_tokens_per_microbatch=16_000,  # distinct tokens of a pass of the update
    max_completion_length=512 if ON_A_GPU else 56,
    use_vllm=ON_A_GPU,
    vllm_mode="colocate",
    vllm_gpu_memory_utilization=0.3,  # of the GPU, for vLLM's weights and cache
    vllm_max_model_length=1024,
    bf16=ON_A_GPU,
    use_cpu=not ON_A_GPU,
    model_init_kwargs={"dtype": "bfloat16" if ON_A_GPU else "float32"},
    loss_type="grpo",
    learning_rate=1e-5,
    max_steps=STEPS,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
trainer = PODSTrainer(
    model="Qwen/Qwen2.5-1.5B-Instruct" if ON_A_GPU else str(tiny_policy_path()),
    reward_funcs=accuracy,
    args=args,
    train_dataset=task.train,
    peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"),
)
trainer.train()
