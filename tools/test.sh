#!/usr/bin/env bash
# Builds and tests. Without arguments: the optimised build with warnings as errors, and all tests.
#
# usage: tools/test.sh [--no-setup] [--all | STEP...]
#   release  optimised build, all tests (the default)
#   format   clang-format finds nothing to change, shellcheck nothing to report
#   asan     all tests under AddressSanitizer, UndefinedBehaviorSanitizer and LeakSanitizer
#   tsan     the tests that use threads under ThreadSanitizer
#   fuzz     each libFuzzer target for KDA_FUZZ_SECONDS in all (60)
#   tidy     clang-tidy finds nothing in include/, src/ and tools/
#   python   the wheel, installed into an empty environment and used from another folder
#   cuda     the CUDA backend compiles (fetches a compiler where there is none)
# --all runs every step in this order: the whole gate. ccache is used where it is installed.
# shellcheck disable=SC2317  # the steps are called by name
set -euo pipefail
cd "$(dirname "$0")/.."

steps=()
setup=yes
for argument; do
  case $argument in
    --no-setup) setup=no ;;
    --all) steps=(release format asan tsan fuzz tidy python cuda) ;;
    release | format | asan | tsan | fuzz | tidy | python | cuda) steps+=("$argument") ;;
    *) echo "test: unknown argument $argument; see the head of tools/test.sh" >&2; exit 2 ;;
  esac
done
if ((${#steps[@]} == 0)); then steps=(release); fi

jobs=$(nproc)
launchers=()
if command -v ccache >/dev/null; then
  launchers=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache
    -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
fi

build() {  # preset, targets (everything if none)
  local preset=$1
  shift
  if (($# == 0)); then set -- all; fi
  cmake --preset "$preset" --log-level=WARNING -Wno-dev "${launchers[@]}"
  cmake --build --preset "$preset" --parallel "$jobs" --target "$@"
}

test_all() {  # preset, ctest options...
  local preset=$1
  shift
  ctest --preset "$preset" --parallel "$jobs" --no-tests=error "$@"
}

step_release() {
  build cpu
  test_all cpu
}

step_format() {
  git ls-files '*.h' '*.cpp' '*.cc' '*.c' '*.cu' '*.cuh' |
    xargs clang-format-14 --dry-run --Werror
  git ls-files '*.sh' .ci/run | xargs shellcheck
  echo "format: clean"
}

step_asan() {
  build asan
  test_all asan
}

step_tsan() {
  build tsan kda_thread_tests
  test_all tsan -L threads
}

step_fuzz() {
  build fuzz tests/fuzz/all
  local targets seconds target
  mapfile -t targets < <(find build/fuzz/tests/fuzz -maxdepth 1 -type f -name 'fuzz_*' -perm -u+x)
  seconds=$((${KDA_FUZZ_SECONDS:-60} / ${#targets[@]}))
  for target in "${targets[@]}"; do
    local name=${target##*/}
    mkdir -p "build/fuzz/corpus/$name"
    (cd build/fuzz && "../../$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
      -verbosity=0 -print_final_stats=1 "corpus/$name" "../../tests/fuzz/corpus/${name#fuzz_}")
  done
}

step_tidy() {
  cmake --preset cpu --log-level=WARNING -Wno-dev "${launchers[@]}"
  run-clang-tidy-14 -quiet -j "$jobs" -p build/cpu "$PWD/(src|tools)/"
  echo "tidy: clean"
}

# Without CUDA: the library is the same, and step cuda compiles that part.
step_python() {
  local work=$PWD/build/python source=$PWD wheel
  if ((${#launchers[@]} > 0)); then
    export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
  fi
  export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
  rm -rf "$work"
  python3 -m venv "$work/builder"
  CMAKE_BUILD_PARALLEL_LEVEL=$jobs "$work/builder/bin/pip" wheel . --quiet --no-deps \
    --wheel-dir "$work" -C cmake.define.KDA_CUDA=OFF -C cmake.define.KDA_WERROR=ON
  wheel=$(echo "$work"/native_kda-*.whl)
  python3 -m venv "$work/user"
  "$work/user/bin/pip" install --quiet "$wheel" numpy ml_dtypes pytest
  mkdir -p "$work/elsewhere"
  (cd "$work/elsewhere" && "$work/user/bin/python" -m native_kda.doctor &&
    NATIVE_KDA_WHEEL=$wheel "$work/user/bin/python" -m pytest -p no:cacheprovider \
      --rootdir "$source" "$source/tests/python")
}

step_cuda() {
  local PATH=$PATH:/usr/local/cuda/bin:$PWD/build/cuda-toolkit/bin
  # Registers, spills and lost wgmma overlap of the Hopper kernels, from ptxas; then all the rest.
  cmake --preset cuda-release -DCMAKE_CUDA_FLAGS=-Xptxas=-v --log-level=WARNING -Wno-dev \
    "${launchers[@]}"
  cmake --build --preset cuda-release --parallel "$jobs" --target kda_sm90 --clean-first 2>&1 |
    tools/kernel_resources.py
  cmake --build --preset cuda-release --parallel "$jobs" \
    --target kda_program kda_cuda_tests kda_cuda_plan_tests 2>&1 |
    grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame'
}

if [[ $setup == yes ]]; then
  case " ${steps[*]} " in
    *' cuda '*) tools/setup.sh --gate --cuda ;;
    ' release ') tools/setup.sh --test ;;
    *) tools/setup.sh --gate ;;
  esac
fi

if ((${#steps[@]} == 1)); then
  "step_${steps[0]}"
  exit
fi

# Each step runs in a process of its own, so that a failure stops that step but not the others.
summary=()
failed=0
for step in "${steps[@]}"; do
  echo
  echo "=== $step ==="
  start=$SECONDS
  verdict=passed
  "$0" --no-setup "$step" || verdict=FAILED
  [[ $verdict == passed ]] || failed=$((failed + 1))
  summary+=("$(printf '%-8s %s in %d s' "$step" "$verdict" $((SECONDS - start)))")
done
echo
echo "=== summary ==="
printf '%s\n' "${summary[@]}"
exit $((failed > 0))
