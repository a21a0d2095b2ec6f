#!/usr/bin/env bash
# The paper's figures on one H200, the most valuable first, in parts of under ten minutes; each ends with what it has.
#   h200.sh lengths FILE            anywhere: ShareGPT's lengths, so that the GPU machine needs no data set (2.7 MB)
#   h200.sh a|b|c|d OUT LENGTHS     on the GPU machine, from the repository's root; results in OUT/serving-*.jsonl
#   h200.sh after OUT LENGTHS       anywhere: the simulator beside what was measured
# a: figure 10, this engine and its stateless mode
# b: figure 10, vLLM stateless, with offloading, with prefix caching; PYTHONPATH must lead to vLLM
# c: figures 13 and 14       d: figures 15, 3 and 4, and single turns, for which state can't help
# A part's last stages are cut where time is short: each point is kept as soon as it is measured. Programs compiled in
# one part serve the next on the same machine.
# Users think 10 s in figures 10, 13 and 14, with all of 40 GB on the GPU and 64 GB in the host: nothing is compressed.
# PENSIEVE_COMMIT names the commit, for a copy without a repository.
set -u
part=$1 out=${2:?the folder of results} lengths=${3-}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-/tmp/jax-cache} HF_HUB_OFFLINE=1
begin=$SECONDS
short=(--lengths "$lengths" --out "$out" --max-rows 128 --duration 50 --warm-up 20 --drain 10)
busy=("${short[@]}" --think-time 10 --factor 1 --host-kv-gb 64 --head-start 1000)
opt=("${busy[@]}" --rates 1.2)
slow=("${short[@]}" --systems pensieve --think-times 30,60,600 --factor 12 --rates 5)

stage() { # seconds, script, options
  echo "== $((SECONDS - begin)) s: ${*:2}"
  timeout -k 5 "$1" python3 -m "benchmarks.figures.$2" "${@:3}" 2>&1 || echo "== ended with $?"
}

case $part in
lengths)
  python3 - "$out" <<'PY'
import sys
from pathlib import Path
from pensieve_jax.assets import DEFAULT_FOLDER, fetch_sharegpt
from pensieve_jax.simulator import read_workload, write_jsonl
write_jsonl(Path(sys.argv[1]), read_workload(fetch_sharegpt(DEFAULT_FOLDER), "sharegpt"))
PY
  ;;
a)
  stage 580 fig10 "${busy[@]}" --systems pensieve,stateless --rates "pensieve=8,12;stateless=4,8"
  ;;
b)
  export JAX_PLATFORMS=cpu VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
  export VLLM_WORKER_MULTIPROC_METHOD=spawn # this process has threads of JAX, which don't go with a fork
  export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
  stage 220 fig10 "${busy[@]}" --systems vllm-stateless --rates 4,8
  stage 240 fig10 "${busy[@]}" --systems vllm-offload --rates 8,12
  stage 120 fig10 "${busy[@]}" --systems vllm-prefix --rates 8
  ;;
c)
  stage 240 fig13 "${busy[@]}" --systems separate,pensieve --rates 8
  stage 330 fig14 "${opt[@]}" --part measure
  ;;
d)
  stage 280 fig15 "${slow[@]}" --part measure
  stage 100 fig03 --out "$out" --max-rows 128
  stage 70 fig04 --out "$out"
  timeout -k 5 130 python3 -m benchmarks.serving --name single --model llama-2-13b-kv10 --source synthetic --mean-turns 1 \
    --mean-input-tokens 500 --systems pensieve,stateless --rates 10 --max-rows 128 --host-kv-gb 16 --conversations 1000 \
    --duration 30 --warm-up 8 --drain 10 --out "$out" || echo "== ended with $?"
  ;;
after)
  stage 600 fig14 "${opt[@]}" --part simulate
  stage 600 fig15 "${slow[@]}" --part simulate
  ;;
*) echo "part: got $part, expected lengths, a, b, c, d or after" >&2; exit 2 ;;
esac
echo "== $((SECONDS - begin)) s in all"
