# Command 2 of 2, once command 1 was read:   LLAMA_GPU_OFF=<the parts that lost> bash .visit/go3.sh     limits: 75 + 75 + 30 + 55 + 55 + 35 = 325 s; END = 340 s
set -o pipefail
: "${OUT:=/tmp/out}"; mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/tc} PYTORCH_NVML_BASED_CUDA_CHECK=1 HF_HUB_OFFLINE=1
PY=${PY:-python3}; END=${END:-340}; off=$LLAMA_GPU_OFF
begin=$SECONDS
left() { echo $((END - SECONDS + begin)); }
step() {
  local limit=$(($1 * ${SLOW:-1})); shift
  [ "$(left)" -lt 8 ] && { echo "=== no time is left for: $*"; return 99; }
  [ "$(left)" -lt "$limit" ] && limit=$(left)
  echo "=== $((SECONDS - begin)) s, at most $limit: $*"
  timeout -k 3 "$limit" "$@"; local rc=$?
  echo "=== $((SECONDS - begin)) s: status $rc"; return $rc
}
{
  step 75 $PY bench.py --gpu decode $QUICK --out "$OUT/r.json"
  step 75 $PY bench.py --gpu speculation $QUICK --out "$OUT/r.json"
  step 30 $PY "$(dirname "$0")/alpha.py" $QUICK
  step 55 $PY bench.py --gpu serving $QUICK --out "$OUT/r.json"
  LLAMA_GPU_OFF=${off:+$off,}chunks step 55 $PY bench.py --gpu serving $QUICK --out "$OUT/chunks-of-512.json"
  step 35 $PY bench.py --gpu kernels $QUICK --out "$OUT/r.json"
  [ "$(left)" -gt 20 ] && step 170 $PY bench.py --gpu peers $QUICK --out "$OUT/r.json"
  echo "=== $((SECONDS - begin)) s: end"
} 2>&1 | tee "$OUT/log2.txt"
