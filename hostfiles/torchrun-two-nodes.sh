#!/bin/bash
# torchrun on two nodes, two ranks on each. Run it on both nodes, with the same MASTER_ADDR:
#
#   node-a$ NODE_RANK=0 MASTER_ADDR=node-a hostfiles/torchrun-two-nodes.sh --prompt "Hello"
#   node-b$ NODE_RANK=1 MASTER_ADDR=node-a hostfiles/torchrun-two-nodes.sh --prompt "Hello"
#
# MODEL=DIR takes another model than the one that comes with LABInfer. What follows the script's name goes to launch.py
# and must be the same on both nodes. Only rank 0, on the node with NODE_RANK=0, reads --input and writes the output.

set -eu
: "${NODE_RANK:?set NODE_RANK to 0 on the first node and to 1 on the second}"
: "${MASTER_ADDR:?set MASTER_ADDR to the host name or address of the first node}"

# If gloo picks an interface that the other node cannot reach, name the right one:
# export GLOO_SOCKET_IFNAME=eth0

cd "$(dirname "$0")/.."
exec torchrun --nnodes "${NNODES:-2}" --nproc-per-node "${NPROC_PER_NODE:-2}" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    launch.py --model "${MODEL:-demo}" -tp "${NPROC_PER_NODE:-2}" -pp "${NNODES:-2}" "$@"
