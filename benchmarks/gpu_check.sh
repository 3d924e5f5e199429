#!/usr/bin/env bash
# A first look at a new GPU host, meant for 5 minutes: are the nearest words right
# there, and how far from the roof are they? Rows and tables go to $OUT.
#
#   bash benchmarks/gpu_check.sh
#   V=5000 D=32 B=256 NUM_QUERIES=512 REPEATS=3 bash benchmarks/gpu_check.sh
#
# PYTHON names an interpreter to use; where it lacks jax with a GPU and the
# host has one, a virtual environment is made in $OUT/venv.
set -euo pipefail
cd "$(dirname "$0")/.."
V=${V:-400000} D=${D:-300} B=${B:-8192}
NUM_QUERIES=${NUM_QUERIES:-4096} REPEATS=${REPEATS:-20}
KINDS=${KINDS:-gaussian clustered ulp scaled}
HARD=${HARD:-1024}  # queries of each kind of table that rounding finds hard
OUT=${OUT:-results/gpu_check}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"

platform() { "$1" -c 'import jax; print(jax.default_backend())' 2>/dev/null; }

if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv \
    | tee "$OUT/gpu.csv"
  if [ "$(platform "$PYTHON" || true)" != gpu ]; then
    "$PYTHON" -m venv "$OUT/venv"
    PYTHON=$OUT/venv/bin/python
    "$PYTHON" -m pip install --quiet '.[cuda]'
  fi
fi
found=$(platform "$PYTHON") || {
  echo "gpu_check: $PYTHON has no jax; pip install '.[cuda]'" >&2; exit 2; }
if command -v nvidia-smi >/dev/null && [ "$found" != gpu ]; then
  echo "gpu_check: jax of $PYTHON does not see the GPU" >&2; exit 2
fi
echo "== platform: $found, V=$V D=$D B=$B"

echo "== correctness: ids of $NUM_QUERIES queries against float64"
status=0
for kind in $KINDS; do
  rows=$V queries=$NUM_QUERIES
  if [ "$kind" != gaussian ]; then
    rows=$((V < 50000 ? V : 50000)) queries=$HARD
  fi
  timeout 150 "$PYTHON" -m benchmarks.exactness --kind="$kind" --V="$rows" \
    --D="$D" --precision=both --num_queries="$queries" \
    --out="$OUT/exactness_$kind.jsonl" || status=$?
done
cat "$OUT"/exactness_*.jsonl
[ "$status" = 0 ] || {
  echo "gpu_check: wrong answers or no time, see $OUT/exactness_*.jsonl" >&2
  exit 1; }

echo "== speed"
timeout 150 "$PYTHON" -m benchmarks.neighbors_bench --noone_core --V="$V" --D="$D" \
  --B="$B" --precision=float32,certified --against=naive \
  --repeats="$REPEATS" --out="$OUT/neighbors.jsonl"
"$PYTHON" -m benchmarks.summary "$OUT/neighbors.jsonl" | tee "$OUT/summary.md"
