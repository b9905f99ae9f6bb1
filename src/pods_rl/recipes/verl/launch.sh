#!/usr/bin/env bash
# PODS with verl on GSM8K, on one node or several.
#
#   TRAIN=train.parquet TEST=test.parquet ./launch.sh
#   ESTIMATOR=ppo ./launch.sh trainer.total_epochs=2          # grpo (default), ppo or rloo; verl's keys follow
#
# Several nodes: run it on each with the same NODES and HEAD_ADDRESS, and RANK counting from 0. Node 0 starts Ray's head,
# waits for the others and trains; the others lend their GPUs until it ends. DATA and models lie where all nodes read them.
#
#   NODES=4 RANK=0 HEAD_ADDRESS=10.0.0.1 TRAIN=... TEST=... ./launch.sh
set -euo pipefail

ESTIMATOR=${ESTIMATOR:-grpo}
NODES=${NODES:-1}
RANK=${RANK:-0}
GPUS=${GPUS:-8}
PORT=${PORT:-6379}
TRAIN=${TRAIN:-data/gsm8k/train.parquet}
TEST=${TEST:-data/gsm8k/test.parquet}
PYTHON=${PYTHON:-python3}
PROMPTS=$((16 * NODES))  # whole groups on every node: 16 prompts each

case $ESTIMATOR in
  grpo) estimator=grpo ;;
  ppo) estimator=gae ;;  # PPO: a critic, trained on the kept sessions
  rloo) estimator=rloo ;;
  *) echo "ESTIMATOR must be grpo, ppo or rloo; got '$ESTIMATOR'." >&2; exit 2 ;;
esac

if [ "$NODES" -gt 1 ]; then
  # Newer versions of Ray ask each node for the token in ~/.ray/auth_token: share it, or set RAY_AUTH_MODE=disabled.
  export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
  : "${HEAD_ADDRESS:?set HEAD_ADDRESS to the address of node 0, as all nodes reach it}"
  if [ "$RANK" -gt 0 ]; then
    exec ray start --address "$HEAD_ADDRESS:$PORT" --num-gpus "$GPUS" --block
  fi
  if [ "$RAY_AUTH_MODE" = token ]; then ray get-auth-token --generate > /dev/null 2>&1 || true; fi  # older ones have none
  ray start --head --node-ip-address "$HEAD_ADDRESS" --port "$PORT" --num-gpus "$GPUS"
  trap 'ray stop' EXIT
  until [ "$("$PYTHON" -c "import ray; ray.init('auto', log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))" 2>/dev/null | tail -1)" = "$NODES" ]; do
    echo "waiting for $NODES nodes"; sleep 5
  done
  set -- "+ray_kwargs.ray_init.address=auto" "$@"
fi

"$PYTHON" -m verl.trainer.main_ppo --config-path pkg://pods_rl.recipes.verl --config-name gsm8k \
  data.train_files="$TRAIN" data.val_files="$TEST" data.train_batch_size="$PROMPTS" \
  actor_rollout_ref.actor.ppo_mini_batch_size="$PROMPTS" critic.ppo_mini_batch_size="$PROMPTS" \
  algorithm.adv_estimator="$estimator" trainer.nnodes="$NODES" trainer.n_gpus_per_node="$GPUS" "$@"
