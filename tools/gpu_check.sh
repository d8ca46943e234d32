#!/bin/sh
# Everything that needs a GPU, in one call: tests (each run also as a graph replay), the cases on the
# device, compute-sanitizer on a small list, benchmarks into bench/results/.
#
#   tools/gpu_check.sh              builds with preset cuda-sm90 (KDA_PRESET picks another), then checks
#   tools/gpu_check.sh BUILD_DIR    checks what BUILD_DIR holds
#
# KDA_RESULTS: where the benchmark files go (default bench/results). KDA_CASES_DIR: more case files.
# KDA_PARTS: a subset of "tests verify stress sanitizer decode train stages host hopper"; from decode on
# they are benchmarks. "cuda_tests", "stored_cases", "reports" and "properties" are the pieces of "tests",
# and "memcheck", "racecheck", "initcheck" and "synccheck" those of "sanitizer". KDA_STRESS_SECONDS and
# KDA_STRESS_SEED: how long and from which seed stress draws (60, 1). GTEST_TOTAL_SHARDS and
# GTEST_SHARD_INDEX split the tests further.
# Exits 0 if every part passed.
set -u
cd "$(dirname "$0")/.." || exit 2

parts=${KDA_PARTS:-tests verify stress sanitizer decode train stages host hopper}
results=${KDA_RESULTS:-bench/results}
if [ $# -gt 0 ]; then
  build=$1
else
  preset=${KDA_PRESET:-cuda-sm90}
  cmake --preset "$preset" && cmake --build --preset "$preset" || exit 2
  build=build/$preset
fi
kda=$build/tools/kda/kda
mkdir -p "$results" || exit 2
failures=0

run() {  # run NAME COMMAND...: the verdict goes to stderr, stdout is the command's
  name=$1
  shift
  start=$(date +%s)
  if "$@"; then verdict=pass; else verdict=FAIL; failures=$((failures + 1)); fi
  echo "== $name: $verdict ($(($(date +%s) - start)) s)" >&2
}

wanted() { case " $parts " in *" $1 "*) return 0 ;; *) return 1 ;; esac }

# gtest prints a line a test; of those only what is wrong matters here. $details keeps the rest.
details=$build/gpu_check
mkdir -p "$details" || exit 2
gtest() { "$@" --gtest_brief=1 --gtest_output="json:$details/$name.json"; }

"$kda" doctor || exit 2

if wanted tests || wanted cuda_tests; then
  run cuda_tests gtest "$build/tests/cuda/kda_cuda_tests"
fi
if wanted tests || wanted stored_cases; then
  run stored_cases gtest "$build/tests/cases/kda_cases_test" --gtest_filter='*cuda*'
fi
if wanted tests || wanted reports; then
  run reports gtest "$build/tests/property/kda_report_tests" --gtest_filter='*/cuda:*/sm90'
fi
# What docs/reliability.md shows of a GPU, if both parts ran.
if [ -e "$details/cuda_tests.json" ] && [ -e "$details/reports.json" ]; then
  run record_reports tools/reliability.py --record "$results/cuda_reports.json" \
    --machine "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)" \
    --command "tools/gpu_check.sh, parts cuda_tests and reports" \
    "$details/cuda_tests.json" "$details/reports.json"
fi
if wanted tests || wanted properties; then
  RC_PARAMS="seed=1 max_success=${KDA_PROPERTY_CASES:-40}"
  export RC_PARAMS
  run properties gtest "$build/tests/property/kda_property_tests"
fi

if wanted verify; then
  # The implementations that would answer on the CPU are not asked.
  run verify "$kda" verify --device cuda --json >"$results/verify_cuda.json"
  tail -n 1 "$results/verify_cuda.json"
fi

# Random problems: each implementation by its own name, so the Hopper rows too.
if wanted stress; then
  run stress "$kda" stress --device cuda --seed "${KDA_STRESS_SEED:-1}" \
    --seconds "${KDA_STRESS_SECONDS:-60}" --json >"$results/cuda_stress.json"
  tail -n 1 "$results/cuda_stress.json"
fi

# Two small cases with every option cover each kernel in both directions.
for tool in memcheck racecheck initcheck synccheck; do
  wanted sanitizer || wanted "$tool" || continue
  if ! command -v compute-sanitizer >/dev/null; then
    echo "== sanitizer_$tool: skipped, compute-sanitizer is not installed"
    continue
  fi
  list='CudaSmall.*:*CudaReports.ARCH_01*:Sm90StateScan.PackedSeq*:Sm90ChunkBackward.EachGradientAlone'
  if [ "$tool" = initcheck ]; then
    export KDA_TEST_NO_POISON=1
    # It reports the states that RecurrentStream's bulk copies write as unwritten (seen on an H200, its
    # view of such copies not confirmed); there the poison of the other runs shows gaps.
    list='CudaSmall.*:*CudaReports.ARCH_01*/cuda-CudaSmall.RecurrentStream'
  else
    unset KDA_TEST_NO_POISON
  fi
  run "sanitizer_$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 20 \
    "$build/tests/cuda/kda_cuda_tests" --gtest_brief=1 \
    --gtest_filter="$list"
done

# Training by the generic kernels; part hopper has those made for it.
for suite in decode train stages host; do
  wanted "$suite" || continue
  file=$results/cuda_$suite.json
  if [ "$suite" = train ]; then
    run bench_train "$kda" bench --suite train --device cuda --impl cuda --json >"$file"
    run bench_train_lower_bound "$kda" bench --suite train --gate lower_bound --device cuda \
      --impl cuda --json >>"$file"
  else
    run "bench_$suite" "$kda" bench --suite "$suite" --device cuda --json >"$file"
  fi
  cat "$file"
done

# The forward and backward made for Hopper, and what has a benchmark of its own.
prefill() {
  "$kda" bench --suite prefill --device cuda --impl sm90_chunk_fwd --repeat 15 --json "$@"
}
train() {
  "$kda" bench --suite train --device cuda --impl sm90_chunk_bwd,sm90_chunk_fwd --repeat 11 --json "$@"
}
asked() {  # asked COMMAND...: at the shapes of docs/kernels/README.md
  "$@" --shape 1,8192,96,96,128,128 --shape 16,8192,16,16,128,256 --shape 1,4096,16,16,128,128 \
    --shape 2,4096,64,64,128,128 --shape 1,131072,32,32,128,128
}
swept() {  # over heads and over tokens, for bench/python/plot_times.py
  "$@" --shape 1,8192,8,8,128,128 --shape 1,8192,16,16,128,128 --shape 1,8192,32,32,128,128 \
    --shape 1,8192,48,48,128,128 --shape 1,8192,64,64,128,128 --shape 1,2048,32,32,128,128 \
    --shape 1,32768,32,32,128,128
}
in_segments() {
  "$@" --shape 1,131072,1,1,128,128 --shape 1,32768,4,4,128,128 --shape 1,131072,8,8,128,128 \
    --shape 16,8192,8,8,128,128
}
if wanted hopper; then
  forward=$results/cuda_chunk_fwd.json
  backward=$results/cuda_chunk_bwd.json
  : >"$forward"
  : >"$backward"
  for gate in softplus lower_bound; do
    run "bench_chunk_fwd $gate" asked prefill --gate $gate >>"$forward"
    run "bench_chunk_bwd $gate" swept asked train --gate $gate >>"$backward"
  done
  run bench_segments in_segments prefill >>"$forward"
  for lengths in 1300,547,2048,963,271,3063 1024,1024,1024,1024,1024,1024,1024,1024; do
    run "bench_packed $lengths" prefill --shape 1,8192,96,96,128,128 --lengths $lengths >>"$forward"
  done
  run bench_fp16 train --dtype fp16 --shape 1,8192,96,96,128,128 >>"$backward"
  cat "$forward" "$backward"
  run bench_state_scan "$build/bench/cuda/kda_state_scan_bench" 15 >"$results/cuda_state_scan.json"
  run bench_rates "$build/bench/cuda/kda_hopper_rates" >"$results/cuda_rates.json"
  cat "$results/cuda_state_scan.json" "$results/cuda_rates.json"
fi

echo "failed parts: $failures"
[ "$failures" -eq 0 ]
