#!/usr/bin/env bash
# Installs what this project needs on Debian 12 or a relative. Quick and silent where all is there.
#
# usage: tools/setup.sh [--build | --test | --gate] [--cuda]
#   --build  only the library and the program
#   --test   and the tests (the default)
#   --gate   and the sanitizers, the fuzzer and the static checks
#   --cuda   and, where no nvcc is found, a CUDA 13.0 compiler from PyPI in build/cuda-toolkit
set -euo pipefail
cd "$(dirname "$0")/.."

cuda_version='13.0.*'
groups='build test'
cuda=no
for argument; do
  case $argument in
    --build) groups='build' ;;
    --test) groups='build test' ;;
    --gate) groups='build test gate' ;;
    --cuda) cuda=yes ;;
    *) echo "setup: unknown argument $argument; see the head of tools/setup.sh" >&2; exit 2 ;;
  esac
done

packages_of() {  # groups...
  for group; do sed -n "s/^$group //p" tools/packages.txt; done
}

missing_of() {  # packages...
  local package
  for package; do
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
      echo "$package"
  done
}

as_root() {
  if [[ $(id -u) == 0 ]]; then
    "$@"
  elif ! command -v sudo >/dev/null; then
    echo "setup: to install packages, run this as root or install sudo" >&2
    return 1
  elif [[ -t 0 ]]; then
    sudo "$@"
  else
    sudo -n "$@" </dev/null
  fi
}

apt() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y \
    -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 "$@"
}

retry() {
  local attempt
  for attempt in 1 2 3; do
    "$@" && return 0
    echo "setup: attempt $attempt of 3 failed: $*" >&2
    sleep $((attempt * 5))
  done
  return 1
}

install_packages() {  # packages...
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    cat >&2 <<TEXT
setup: this system has no apt-get, so nothing was installed. Install by other means what these
setup: Debian 12 packages hold, then pass --no-setup to tools/demo.sh and tools/test.sh:
$(printf '  %s\n' "$@")
TEXT
    exit 1
  fi
  local missing
  mapfile -t missing < <(missing_of "$@")
  if ((${#missing[@]} == 0)); then return; fi
  echo "setup: installing ${missing[*]}"
  retry apt update
  retry apt install --no-install-recommends "${missing[@]}"
  mapfile -t missing < <(missing_of "$@")
  if ((${#missing[@]} > 0)); then
    echo "setup: still missing after the installation: ${missing[*]}" >&2
    exit 1
  fi
}

# NVIDIA's wheels hold the whole compiler; two links give them the layout of an installed toolkit.
install_cuda() {
  local venv=build/cuda-venv
  # shellcheck disable=SC2046
  install_packages $(packages_of cuda)
  echo "setup: fetching a CUDA ${cuda_version%.\*} compiler from PyPI into build/cuda-toolkit"
  rm -rf "$venv" build/cuda-toolkit
  mkdir -p build
  python3 -m venv "$venv"
  retry "$venv/bin/pip" install --quiet --disable-pip-version-check \
    "nvidia-cuda-nvcc==$cuda_version" "nvidia-cuda-crt==$cuda_version" \
    "nvidia-nvvm==$cuda_version" "nvidia-cuda-runtime==$cuda_version" \
    "nvidia-cuda-cccl==$cuda_version"
  local toolkit
  toolkit=$(echo "$PWD/$venv"/lib/python3*/site-packages/nvidia/cu13)
  ln -sfn lib "$toolkit/lib64"
  ln -sfn libcudart.so.13 "$toolkit/lib/libcudart.so"
  ln -sfn "$toolkit" build/cuda-toolkit
  build/cuda-toolkit/bin/nvcc --version | tail -n 1
}

# shellcheck disable=SC2046,SC2086
install_packages $(packages_of $groups)
if [[ $cuda == yes ]]; then
  PATH=$PATH:/usr/local/cuda/bin:$PWD/build/cuda-toolkit/bin
  if ! command -v "${CUDACXX:-nvcc}" >/dev/null; then install_cuda; fi
fi
