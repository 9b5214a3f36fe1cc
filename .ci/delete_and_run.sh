#!/usr/bin/env bash
# The core is whole: without the folders around it and bench.py the program says what it said, every test that is left
# finds what it imports, and those of the root's pages pass.
set -euo pipefail
cd "$(dirname "$0")/.."
core=$(mktemp -d)
trap 'rm -rf "$core"' EXIT

tell() { python generate.py --draft tiny-draft --temperature 0 --dtype float64 --max-tokens 20 "Once upon a time"; }
whole=$(tell)
git clone -q . "$core"
cd "$core"
rm -r gpu cpu train measure bench.py
[ "$(tell)" = "$whole" ] || { echo "without the folders the program tells something else"; exit 1; }
python -m pytest -q --collect-only app checkpoint > collected.log || { cat collected.log; exit 1; }
python -m pytest -q test_*.py
