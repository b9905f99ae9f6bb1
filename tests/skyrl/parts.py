"""What the tests put in place of SkyRL's parts that need a GPU, and of a model where rewards are given."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import torch
from skyrl.backends.skyrl_train.distributed.dispatch import WorkerOutput
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train.generators.base import GeneratorInterface
from skyrl.train.generators.utils import get_rollout_metrics
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from transformers import AutoModelForCausalLM


class Tracker:
    """Replaces SkyRL's `Tracking`: keeps what is logged."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        self.logged.append({"step": step, **data})

    def finish(self) -> None:
        pass


class Scripted(GeneratorInterface):
    """Replaces SkyRL's generator: no model, rewards by prompt and number.

    Args:
        rewards: the reward of a prompt's trajectory, by instance id and repetition.
        turns: the number of its turns, with step-wise trajectories.
        per_token: give each token a reward, with the trajectory's sum.
        is_masked: whether all tokens of a trajectory have loss mask 0, as of one that failed.
    """

    def __init__(
        self,
        rewards: Callable[[str, int], float],
        *,
        turns: Callable[[str, int], int] | None = None,
        per_token: bool = False,
        is_masked: Callable[[str, int], bool] = lambda uid, number: False,
    ) -> None:
        self.rewards = rewards
        self.turns = turns
        self.per_token = per_token
        self.is_masked = is_masked
        self.batches: list[dict[str, Any]] = []
        self.without_bar: list[bool] = []

    async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> Any:
        self.batches.append(input_batch)
        self.without_bar.append(disable_tqdm)
        await asyncio.sleep(0)
        rows: list[dict[str, Any]] = []
        for place, trajectory_id in enumerate(input_batch["trajectory_ids"]):
            ids = (trajectory_id.instance_id, trajectory_id.repetition_id)
            turns = 1 if self.turns is None else self.turns(*ids)
            for turn in range(turns):
                rows.append(self.row(trajectory_id, turn, turns, place))
        output = {name: [row[name] for row in rows] for name in rows[0]}
        output["rollout_metrics"] = get_rollout_metrics(output["response_ids"], output["rewards"])
        output["rollout_expert_indices"] = None
        times = output["trajectory_generation_times"]
        output["trajectory_time_splits"] = {"llm": list(times), "env": [time / 2 for time in times]}  # in its main
        if self.turns is None:
            output["is_last_step"] = None
            output["trajectory_ids"] = None
        return output

    def row(self, trajectory_id: Any, turn: int, turns: int, place: int) -> dict[str, Any]:
        number = trajectory_id.repetition_id
        tokens = 2 + (number + turn) % 3
        reward: Any = self.rewards(trajectory_id.instance_id, number)
        if turn < turns - 1:
            reward = -5.0  # of a turn that is not the last, which SkyRL does not train with
        if self.per_token:
            reward = [0.0] * (tokens - 1) + [reward]
        return {
            "prompt_token_ids": [10, 11],
            "response_ids": [20 + number] * tokens,
            "rewards": reward,
            "loss_masks": [int(not self.is_masked(trajectory_id.instance_id, number))] * tokens,
            "stop_reasons": "stop",
            "rollout_logprobs": [-0.5 - number] * tokens,
            "trajectory_ids": trajectory_id,
            "trajectory_generation_times": float(place),
            "is_last_step": turn == turns - 1,
            "env_metrics": {"number": number},
        }


class Engine:
    """Replaces the vLLM servers: the policy generates in this process, with the weights of the last synchronisation."""

    def __init__(self, path: str, tokenizer: Any, seed: int = 0) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.tokenizer = tokenizer
        self.random = torch.Generator().manual_seed(seed)
        self.requests = 0

    async def generate(self, input_batch: Any, model: str | None = None) -> dict[str, Any]:
        (prompt,) = input_batch["prompt_token_ids"]
        self.requests += 1
        tokens, logps = self.sample(prompt, input_batch["sampling_params"]["max_tokens"])
        stopped = tokens[-1] == self.tokenizer.eos_token_id
        return {
            "responses": [self.tokenizer.decode(tokens, skip_special_tokens=True)],
            "response_ids": [tokens],
            "stop_reasons": ["stop" if stopped else "length"],
            "response_logprobs": [logps],
        }

    @torch.no_grad()
    def sample(self, prompt: list[int], limit: int) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        logps: list[float] = []
        cache = None
        ids = torch.tensor([prompt])
        while len(tokens) < limit:
            result = self.model(ids, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            probabilities = result.logits[0, -1].softmax(-1)
            token = int(torch.multinomial(probabilities, 1, generator=self.random))
            tokens.append(token)
            logps.append(float(probabilities[token].log()))
            ids = torch.tensor([[token]])
            if token == self.tokenizer.eos_token_id:
                break
        return tokens, logps

    async def finish_session(self, session_id: str) -> None:
        pass


class Dispatch:
    """Replaces `WorkerDispatch`, its Ray actors and FSDP: the policy is trained in this process, with SkyRL's loss.

    SkyRL's workers take a CUDA device where they start, where they compute and where they make a mesh.
    """

    def __init__(self, config: Any = None, engine: Engine | None = None, lr: float = 0.0) -> None:
        self.trained: list[Any] = []  # every mini-batch
        if engine is None:
            return
        self.config = config
        self.engine = engine
        self.model = copy.deepcopy(engine.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    def get_lcm_dp_size(self) -> int:
        return 1

    def init_weight_sync_state(self, client: Any) -> None:
        pass

    async def save_weights_for_sampler(self) -> None:
        self.engine.model.load_state_dict(self.model.state_dict())

    def empty_cache(self, model: str | None = None) -> None:
        pass

    def get_timing_metrics(self) -> dict[str, float]:  # since 0.4
        return {}

    def finalize_pending_saves(self, model: str) -> None:  # since 0.4
        pass

    def forward_from_staged(self, model: str, batch: Any) -> WorkerOutput:
        with torch.no_grad():
            rows = self.logps(batch).tolist()
        return WorkerOutput(loss_fn_outputs=[{"logprobs": row} for row in rows])

    def stage_data(self, model: str, data: Any, boundaries: list[tuple[int, int]]) -> list[Any]:
        return [data[start:end] for start, end in boundaries]

    def forward_backward_from_staged(self, model: str, batch: Any) -> WorkerOutput:
        self.trained.append(batch)
        loss, _ = PolicyLossRegistry.get(self.config.trainer.algorithm.policy_loss_type)(
            self.logps(batch),
            batch["action_log_probs"],
            batch["advantages"],
            config=self.config.trainer.algorithm,
            loss_mask=batch["loss_mask"],
            rollout_logprobs=None,
        )
        loss.backward()
        return WorkerOutput(metrics={"policy_loss": loss.item()})

    def optim_step(self, model: str) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def logps(self, data: Any) -> torch.Tensor:
        """Return the log-probability of each response token, as SkyRL's model wrapper does, `[rows, T]`."""
        tokens = data.metadata["response_length"]
        mask = data["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self.model(data["sequences"], attention_mask=mask, position_ids=positions).logits
        logps = logits[:, :-1].log_softmax(-1).gather(-1, data["sequences"][:, 1:, None]).squeeze(-1)
        return logps[:, -tokens:]


class DigitsEnv(BaseTextEnv):
    """Rewards the share of sevens among the four characters of a response: a policy learns it in a few steps."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=action.count("7") / 4, done=True, metadata={})
