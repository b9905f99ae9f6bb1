"""Training with a real vLLM on a CPU: the size of its requests, and the weights that it has.

The trainer computes in float32 and vLLM in bf16. The sampled tokens' log-probabilities differed (mean, absolute) by
at most 0.019 with the trainer's weights, by at least 2.4 with older ones and 0.5 with the initial ones.
"""

from typing import Any

import pytest

FOLLOWS = 0.05  # at most, where vLLM has the trainer's weights
OTHER = 0.2  # at least, where it has others


def check_followed(steps: list[dict[str, Any]]) -> None:
    """Every generation is from the trainer's weights, and after the first step not from the initial ones."""
    assert max(step["to_trainer"] for step in steps) < FOLLOWS, steps
    assert min(step["to_initial"] for step in steps[1:]) > OTHER, steps


def check_shapes(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        assert step["shapes"][0] == step["shapes"][1], "a log-probability for each token"
        assert step["shapes"][0][0] == step["rows"]


def test_n_are_generated_a_few_at_once_and_m_trained_on(saw):
    (found,) = saw("colocate")
    assert [step["asked"] for step in found["steps"]] == [[64]] * len(found["steps"])
    assert {(step["rollouts"], step["rows"]) for step in found["steps"]} == {(64, 16)}
    assert found["at_once"] == 24  # `rollout_batch_size`: seen in what vLLM's scheduler puts into a step


@pytest.mark.parametrize("case", ["colocate", "lora"])
def test_vllm_has_the_weights_of_each_step(saw, case):
    (found,) = saw(case)
    check_followed(found["steps"])
    check_shapes(found["steps"])


def test_two_processes(saw):
    reports = saw("processes")
    assert len(reports) == 2
    for found in reports:
        assert [step["asked"] for step in found["steps"]] == [[32]] * 4
        assert [step["rows"] for step in found["steps"]] == [8] * 4
        check_followed(found["steps"])
        check_shapes(found["steps"])


def test_a_resumed_run_has_the_checkpoint_s_weights_and_prompts(saw):
    """The weights of a new engine are those of the policy's folder, until they are sent."""
    (first,), (resumed,) = saw("colocate"), saw("resumed")
    (step,) = resumed["steps"]
    assert step["prompts"] == first["steps"][2]["prompts"]
    check_followed([step, step])


def test_a_server_generates_n_in_one_request_and_has_the_weights(saw):
    (found,) = saw("served")
    assert found["requests"] == [[1, 64]] * 4
    assert {(step["rollouts"], step["rows"]) for step in found["steps"]} == {(64, 16)}
    check_followed(found["steps"])
    check_shapes(found["steps"])


def test_evaluations_agree_within_their_standard_errors(saw):
    results = [next(iter(line["results"].values())) for line in saw("evaluated")[0].values()]
    ours, theirs = ((metrics["accuracy"], metrics["accuracy_stderr"]) for metrics in results)
    assert abs(ours[0] - theirs[0]) < 4 * (ours[1] ** 2 + theirs[1] ** 2) ** 0.5, results
    assert min(ours[0], theirs[0]) > 0.1
