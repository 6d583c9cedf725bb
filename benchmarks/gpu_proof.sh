#!/usr/bin/env bash
# Show what only a GPU can: the tests that need one, and the benchmarks. Prints one table; at most 40 minutes.
#
# bash benchmarks/gpu_proof.sh [--quick] [FOLDER]    in an environment with the package, its tests' extras and a CUDA
#                                                    build of torch; logs and rows are kept in FOLDER (gpu_proof)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
quick=()
if [ "${1:-}" = --quick ]; then
  quick=(--quick)
  shift
fi
folder=${1:-gpu_proof}
mkdir -p "$folder"
rows=()
failed=0

run() { # NAME SECONDS COMMAND ...
  local name=$1 limit=$2 start=$SECONDS status=0 outcome=passed
  shift 2
  timeout "$limit" "$@" >"$folder/$name.log" 2>&1 || status=$?
  [ "$status" = 0 ] || outcome="failed ($status)"
  [ "$status" = 124 ] && outcome="stopped after $limit s"
  [ "$outcome" = passed ] || failed=1
  rows+=("| $name | $outcome | $((SECONDS - start)) | $(grep -v '^$' "$folder/$name.log" | tail -n 1 | tr '|' ' ') |")
}

run device 60 python -c 'import torch; print(torch.cuda.get_device_properties(0), torch.__version__, torch.version.cuda)'
OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 run tests 900 \
  python -m pytest -q -n "$(($(nproc) * 2 / 3 + 1))" --dist=worksteal -m "gpu and not weekly"
for benchmark in moe scan rnn rbm relational precision native; do
  run "$benchmark" 160 python "benchmarks/bench_$benchmark.py" --device cuda --json "$folder/$benchmark.json" "${quick[@]}"
done
run quantization 160 python benchmarks/bench_quantization.py --device cuda --quick --json "$folder/quantization.json"
run moe_lm 160 python benchmarks/bench_moe_lm.py --device cuda --quick --json "$folder/moe_lm.json"

printf '%s\n' "| part | outcome | seconds | last line |" "|---|---|---|---|" "${rows[@]}" | tee "$folder/table.md"
exit "$failed"
