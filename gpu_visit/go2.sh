# Command 1 of 2, in the project's root:   bash .visit/go2.sh        limits: 20 + 150 + 130 + 100 + 30 = 430 s; END = 460 s
# PY: the interpreter (a rehearsal: PY="python3 .visit/pretend.py"); QUICK=--quick and TINY=1 for toy shapes.
set -o pipefail
: "${OUT:=/tmp/out}"; mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/tc} PYTORCH_NVML_BASED_CUDA_CHECK=1 HF_HUB_OFFLINE=1
PY=${PY:-python3}; END=${END:-460}; here=$(dirname "$0")
if [ ! -d "$TRITON_CACHE_DIR" ] && [ -f "$here/cache.tar.xz" ]; then mkdir -p "$TRITON_CACHE_DIR" && tar xf "$here/cache.tar.xz" -C "$TRITON_CACHE_DIR"; fi
begin=$SECONDS
left() { echo $((END - SECONDS + begin)); }
step() { # limit, then a command: killed at its limit, or at the end of all
  local limit=$(($1 * ${SLOW:-1})); shift
  [ "$(left)" -lt 8 ] && { echo "=== no time is left for: $*"; return 99; }
  [ "$(left)" -lt "$limit" ] && limit=$(left)
  echo "=== $((SECONDS - begin)) s, at most $limit: $*"
  timeout -k 3 "$limit" "$@"; local rc=$?
  echo "=== $((SECONDS - begin)) s: status $rc"; return $rc
}
TESTS="-m pytest -q -m gpu -p no:cacheprovider --tb=line --maxfail=6 -rf"
{
  step 20 $PY bench.py --gpu machine $QUICK --out "$OUT/machine.json"
  step 150 $PY $TESTS ${TEST_FILES:-gpu/test_layer.py gpu/test_contract.py test_kernels.py} > "$OUT/tests.txt" 2>&1; rc=$?
  grep -a "^===" "$OUT/tests.txt"; tail -n 12 "$OUT/tests.txt"
  keep=""
  if [ $rc -ne 0 ] && [ $rc -lt 124 ]; then # which part is at fault: the failed tests again, without one part after the other
    failed=$(grep -aoE "^FAILED \S+(\[[^]]*\])?" "$OUT/tests.txt" | cut -c8- | head -n 4 | tr '\n' ' ')
    for off in fetch early apart early,fetch,apart; do
      if LLAMA_GPU_OFF=$off step 45 $PY $TESTS $failed; then keep=$off; echo "=== right without: $off"; break; fi
    done
  fi
  export LLAMA_GPU_OFF=$keep
  SECONDS_LEFT=130 step 130 $PY "$here/ab.py" $QUICK ${AB:-8B,"16 bits" 8B,INT4}
  step 100 $PY "$here/tune.py" 92 ${PARTS:-decode some texts}
  step 30 $PY bench.py --gpu profile $QUICK --out "$OUT/profile.json"
  echo "=== $((SECONDS - begin)) s: end"
} 2>&1 | tee "$OUT/log1.txt"
