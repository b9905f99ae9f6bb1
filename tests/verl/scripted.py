"""An agent loop whose sessions do what the data set says: no model."""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput


class ScriptedLoop:
    """Session i of a prompt gets `rewards[i]`, leaves `turns[i]` trajectories, or fails where `turns[i]` is 0.

    It asks no server.
    """

    def __init__(self, **_: Any) -> None:
        pass

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        script, session = row["extra_info"], row["session_id"]
        turns = script["turns"][session % len(script["turns"])]
        if turns == 0:
            raise RuntimeError(f"session {session} fails, as scripted")
        reward = script["rewards"][session % len(script["rewards"])]
        return [self.trajectory(session, turn, reward, row["global_steps"]) for turn in range(turns)]

    @staticmethod
    def trajectory(session: int, turn: int, reward: float, step: int) -> AgentLoopOutput:
        tokens = 2 + (session + turn) % 3
        return AgentLoopOutput(
            prompt_ids=[5] * 3,
            response_ids=[6] * tokens,
            response_mask=[1] * tokens,
            response_logprobs=[-0.5] * tokens,
            reward_score=reward,
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={
                "reward_extra_info": {"score": reward},
                "turn_scores": [reward] * (session % 2),
                "min_global_steps": step,
                "max_global_steps": step,
            },
        )
