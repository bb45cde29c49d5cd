#!/usr/bin/env bash
# The kernel's tests under AddressSanitizer and UndefinedBehaviorSanitizer.
#
# A copy of the package, with an instrumented kernel, is built in build/asan; the one
# in src/ is left alone. Python itself is not instrumented, so the runtime is
# preloaded; PYTHONMALLOC=malloc lets it see every object's memory, and leaks are not
# looked for (an interpreter keeps plenty until it exits).
#
#   tests/asan.sh [pytest arguments; default: the kernel's tests]
set -euo pipefail
cd "$(dirname "$0")/.."

python=$PWD/.venv/bin/python
tree=build/asan

POLYBUS_BUILD_DIR=$tree \
POLYBUS_CFLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined" \
POLYBUS_LDFLAGS="-fsanitize=address,undefined" \
    "$python" setup.py -q build --build-lib "$tree/lib"

tests=("$@")
if [ ${#tests[@]} = 0 ]; then
    for folder in tests/unit/kernel tests/property/kernel; do
        [ -d "$folder" ] && tests+=("$folder")
    done
fi
if [ ${#tests[@]} = 0 ]; then
    echo "polybus: no kernel tests to run under AddressSanitizer" >&2
    exit 1
fi

export PYTHONPATH=$PWD/$tree/lib
export PYTHONMALLOC=malloc
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1
export UBSAN_OPTIONS=print_stacktrace=1:abort_on_error=1
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"

# The proof that it is this copy that runs, and not the one in src/.
"$python" -c "
import polybus.kernel, sys
sys.exit('/build/asan/' not in polybus.kernel.__file__)" ||
    { echo "polybus: the instrumented copy was not used" >&2; exit 1; }

# The sanitizers write to the real stderr and abort: pytest must not hold it back.
"$python" -m pytest -q --capture=sys --timeout 600 "${tests[@]}"
