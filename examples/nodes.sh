#!/usr/bin/env bash
# One run of `pods train` over several nodes: each node runs this script, and all read and write one file system.
#
#   sbatch --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --time=24:00:00 --signal=TERM@300 \
#     --wrap 'GPUS=8 srun examples/nodes.sh --config my.yaml --output runs/mine'
#
# The signal reaches each node's `pods train`, which saves a checkpoint and stops; add --resume to continue. Without Slurm,
# on each node with the same NODES, HEAD_ADDRESS and GPUS, and with NODE counting from 0:
#
#   NODES=2 NODE=0 HEAD_ADDRESS=10.0.0.1 GPUS=8 examples/nodes.sh --config my.yaml --output runs/mine
#
# LAYOUT is how the processes share the model: ddp, fsdp2 (the default), zero2 or zero3 (`pods recipes --path fsdp2`).
set -euo pipefail

NODES=${NODES:-${SLURM_NNODES:?set NODES, the number of nodes}}
NODE=${NODE:-${SLURM_NODEID:?set NODE, the number of this node from 0}}
GPUS=${GPUS:?set GPUS, the number of processes on each node}
HEAD_ADDRESS=${HEAD_ADDRESS:-$(scontrol show hostnames "${SLURM_JOB_NODELIST:?set HEAD_ADDRESS, the address of node 0}" | head -n 1)}
PORT=${PORT:-29500}
LAYOUT=${LAYOUT:-fsdp2}

# accelerate's configuration of this node: the shipped one, for more than one machine
config=$(mktemp -d)/$LAYOUT.yaml
grep -vE '^(num_machines|machine_rank|main_process_ip|main_process_port):' "$(pods recipes --path "$LAYOUT")" > "$config"
cat >> "$config" <<EOF
num_machines: $NODES
machine_rank: $NODE
main_process_ip: $HEAD_ADDRESS
main_process_port: $PORT
EOF
exec pods train --accelerate_config "$config" --num_processes $((NODES * GPUS)) "$@"
