#!/usr/bin/env bash
# Checks on a machine with a GPU what no other can: six steps, under five minutes. Needs the project in PYTHON's environment.
#
#   bash benchmarks/gpu_check.sh [OUT]      PYTHON=python3 by default; OUT, by default ./gpu-check, gets the records
#
# Exit code: 0 if every step holds, 1 if one does not, 2 without a GPU.
set -u
PYTHON=${PYTHON:-python3}
OUT=${1:-gpu-check}
MODEL=${MODEL:-mixtral-small}
cd "$(dirname "$0")/.." || exit 2
bench() { timeout 60 "$PYTHON" -m capricorn "$@"; }
why=$("$PYTHON" -c 'from capricorn.sizing.gpus import find_gpus; g = find_gpus(); print(g.why_none)') || exit 2
if [ -n "$why" ]; then
  echo "error: gpu_check needs a GPU, found none: $why; run it on a machine with one" >&2
  exit 2
fi
if [ -e "$OUT" ]; then
  echo "error: $OUT is there already; name another folder" >&2
  exit 2
fi
failed=0
step() { # step NAME COMMAND...: each command takes a minute at most
  local name=$1 begin=$SECONDS
  shift
  echo "== $name"
  if "$@"; then echo "ok: $name ($((SECONDS - begin)) s)"; else
    echo "FAILED: $name (exit code $?)"
    failed=1
  fi
}
one=(--device cuda --nodes 1 --ranks-per-node 1 --model "$MODEL" --seed 0 --iterations 20)
gpus=$("$PYTHON" -c 'from capricorn.sizing.gpus import find_gpus; print(len(find_gpus().found))')
refused() { # more ranks than GPUs: one line on stderr, exit code 2
  local said code
  said=$(bench run --device cuda --nodes $((gpus + 1)) --ranks-per-node 1 --model "$MODEL" --out "$OUT/refused" 2>&1)
  code=$?
  echo "$said"
  [ $code -eq 2 ] && [ "$(echo "$said" | wc -l)" -eq 1 ]
}
digests() { grep -rhoE '"state_digest": ?"[0-9a-f]+"' "$OUT/$1" --include=events.jsonl | sort -u; }
same() { # the state at the end, bit for bit
  echo "plain:  $(digests plain)"
  echo "killed: $(digests killed)"
  [ -n "$(digests plain)" ] && [ "$(digests plain)" = "$(digests killed)" ]
}
step "doctor: a GPU for the rank, its memory, the start of the store" bench doctor "${one[@]:0:8}"
step "more ranks than GPUs are refused" refused
step "one rank trains and checkpoints" bench run "${one[@]}" --out "$OUT/plain" -q
step "a killed rank comes back from the store" bench run "${one[@]}" --out "$OUT/killed" -q --fault kill@rank=0,iteration=8
step "what was killed ends with the state of what was not" same
step "staging, deterministic sums, times by events" timeout 90 "$PYTHON" -m benchmarks gpu
exit $failed
