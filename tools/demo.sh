#!/usr/bin/env bash
# The shortest way to see the library at work: builds the program kda, runs forward and backward of
# one layer of a trained language model, and compares every result with the stored exact one.
#
# usage: tools/demo.sh [--no-setup]
set -euo pipefail
cd "$(dirname "$0")/.."

case_file=tests/data/lm_layer1_softplus.safetensors
build=build/demo
case ${1:-} in
  '') tools/setup.sh --build ;;
  --no-setup) ;;
  *) echo "demo: unknown argument $1; see the head of tools/demo.sh" >&2; exit 2 ;;
esac

step() {
  echo
  echo "\$ $*"
  "$@"
}

step cmake -S . -B "$build" -G Ninja -Wno-dev --log-level=WARNING -DCMAKE_BUILD_TYPE=Release \
  -DKDA_CUDA=OFF -DKDA_TESTS=OFF -DKDA_BENCH=OFF
step cmake --build "$build" --target kda_program
kda=$(find "$build/tools" -type f -name kda -perm -u+x)
step "$kda" run "$case_file" -o "$build/result.safetensors"
step "$kda" verify "$case_file"
