# bash make_cache.sh [jobs]    in the project's root, at the commit that will run: a kernel's key holds its source and its line number.
# Makes .visit/: the scripts, and cache.tar.xz, all kernels of the plan for sm_90 (1 s each and core), with and without the parts that ab.py turns off.
# Needs the device's Python (3.12) with torch 2.11 and triton 3.6.0 in /tmp/v36 (a CPU build of torch compiles the same).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-/tmp/v36/bin/python}
if [ ! -x "$python" ]; then
  base=$(ls -d "$HOME"/.pyenv/versions/3.12.*/bin/python 2>/dev/null | tail -1); ${base:-python3.12} -m venv /tmp/v36
  /tmp/v36/bin/pip install -q --no-compile torch==2.11.0 triton==3.6.0 "numpy<2.4" safetensors tiktoken regex huggingface_hub tokenizers jinja2 pytest hypothesis
fi
export LAUNCHERS=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/tc} TRITON_STORE_BINARY_ONLY=1 OMP_NUM_THREADS=1 JOBS=${1:-2}
mkdir -p .visit
cp "$here"/{go2.sh,go3.sh,ab.py,alpha.py,tune.py,precompile.py,launchers.py,pretend.py,README.md} .visit/
for off in "" fetch early early,fetch; do LLAMA_GPU_OFF=$off "$python" "$here/precompile.py" ${ROWS:-} | tail -3; done
"$python" "$here/tune.py" compile ${PARTS:-decode some texts} | tail -1
find "$TRITON_CACHE_DIR" -name '*.source' -delete  # only tests read it
tar cf - -C "$TRITON_CACHE_DIR" . | xz -6 > .visit/cache.tar.xz
ls -l .visit/cache.tar.xz
grep -qx /.visit/ .git/info/exclude 2>/dev/null || echo /.visit/ >> .git/info/exclude
