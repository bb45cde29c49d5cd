#!/usr/bin/env bash
# Fuzzes every target in tests/fuzz/, so many seconds each, on a copy of the package in
# build/fuzz whose kernel counts its branches and runs under the sanitizers.
# What it learns stays in build/fuzz/corpus, and the next run starts from there.
#
#   tests/fuzz.sh SECONDS [target.py ...]
set -euo pipefail
cd "$(dirname "$0")/.."

python=$PWD/.venv/bin/python
tree=build/fuzz
seconds=${1:?usage: tests/fuzz.sh SECONDS [target.py ...]}
shift
shopt -s nullglob
targets=("$@")
[ ${#targets[@]} = 0 ] && targets=(tests/fuzz/*.py)
[ ${#targets[@]} = 0 ] && { echo "polybus: no targets in tests/fuzz" >&2; exit 1; }

coverage_flags=$("$python" -c 'from tests.rig.fuzz.coverage import FLAGS; print(FLAGS)')
POLYBUS_BUILD_DIR=$tree \
POLYBUS_CFLAGS="-O1 -g -fno-omit-frame-pointer $coverage_flags -fsanitize=address,undefined -fno-sanitize-recover=undefined" \
POLYBUS_LDFLAGS="-fsanitize=address,undefined" \
    "$python" setup.py -q build --build-lib "$tree/lib"

export PYTHONPATH=$PWD/$tree/lib
export PYTHONMALLOC=malloc
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1
export UBSAN_OPTIONS=print_stacktrace=1:abort_on_error=1
sanitizers="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"

for target in "${targets[@]}"; do
    name=$(basename "$target" .py)
    LD_PRELOAD=$sanitizers "$python" -m tests.rig.fuzz.driver "$target" --seconds "$seconds" \
        --corpus "$tree/corpus/$name" --crashes "$tree/crashes" --build "$tree"
done
