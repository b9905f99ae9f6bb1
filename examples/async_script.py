"""PODS in TRL's asynchronous trainer: a vLLM server generates on one GPU while the policy trains on another.

    VLLM_SERVER_DEV_MODE=1 CUDA_VISIBLE_DEVICES=0 vllm serve Qwen/Qwen2.5-0.5B-Instruct --max-num-seqs 512 \\
      --logprobs-mode processed_logprobs --weight-transfer-config '{"backend": "nccl"}'
    CUDA_VISIBLE_DEVICES=1 python examples/async_script.py

Needs: two GPUs, pods-rl with its extra `vllm`, and `kernels`. The reward runs in another process, so it is a function
of a module, and the code that starts the training is below `if __name__ == "__main__"`.
"""

import random
import re
import sys

from datasets import Dataset

from pods_rl import AsyncPODSConfig, AsyncPODSTrainer
from pods_rl.engines.trl_async import LostRolloutsError

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SETTINGS = {
    "output_dir": "runs/async-script",
    "num_generations": 8,  # the rollouts trained of each prompt, as in TRL
    "num_rollouts": 32,  # new: the rollouts requested for each prompt
    "dynamic_sampling": True,  # new: drop prompts whose 32 rewards are all equal
    "per_device_train_batch_size": 32,
    "max_completion_length": 256,
    "max_steps": 200,
    "save_steps": 50,
    "report_to": "none",
}


def reward(completions, answer, **columns):
    """1 if the last number of the completion is the answer."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(re.findall(r"\d+", text)[-1:] == [gold]) for text, gold in zip(texts, answer, strict=True)]


def sums(count=1000):
    """Questions as messages, and their answers."""
    draw = random.Random(0)
    pairs = [(draw.randint(10, 49), draw.randint(10, 50)) for _ in range(count)]
    questions = [[{"role": "user", "content": f"{a}+{b}="}] for a, b in pairs]
    return Dataset.from_dict({"prompt": questions, "answer": [str(a + b) for a, b in pairs]})


def main():
    args = AsyncPODSConfig(**SETTINGS)
    trainer = AsyncPODSTrainer(MODEL, reward_funcs=reward, args=args, train_dataset=sums())
    try:
        trainer.train(resume_from_checkpoint="--resume" in sys.argv)
    except LostRolloutsError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
