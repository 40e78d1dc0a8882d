#!/bin/sh
# wheel_check.sh PYTHON: builds the wheel from the files that git tracks, compares its content with them, installs it
# with the versions of constraints.txt into an environment of its own, first without PyTorch, and runs the command there,
# outside the checkout.
set -eu
python=$1
cd "$(dirname "$0")/.."
constraints=$PWD/constraints.txt
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM
pip="$scratch/venv/bin/python -m pip -qq --disable-pip-version-check"

# From a copy: modules that have been deleted would stay in the build folder of the checkout, and be packed.
mkdir "$scratch/source" "$scratch/wheel"
git ls-files -z | xargs -0 tar cf - | tar xf - -C "$scratch/source"
"$python" -m venv "$scratch/venv"
$pip wheel --no-deps -w "$scratch/wheel" "$scratch/source"
set -- "$scratch"/wheel/*.whl
[ $# = 1 ] || { echo "wheel_check.sh: one wheel is expected: $*" >&2; exit 1; }
wheel=$1

# The code and the data of both packages, and nothing else: templates, the source of the kernel, py.typed; no tests.
git ls-files compressor graph_passes | LC_ALL=C sort >"$scratch/tracked"
"$python" -m zipfile -l "$wheel" | awk 'NR > 1 && $1 !~ /\.dist-info\// { print $1 }' | LC_ALL=C sort >"$scratch/packed"
diff "$scratch/tracked" "$scratch/packed" ||
    { echo "wheel_check.sh: files that $(basename "$wheel") lacks (<) or should not contain (>)" >&2; exit 1; }
echo "$(basename "$wheel"): $(wc -l <"$scratch/packed") files"

$pip install -c "$constraints" "$wheel[onnx]"
(cd "$scratch" && venv/bin/compress recipe >/dev/null && venv/bin/python -c "import compressor.latency")
$pip install -c "$constraints" "$wheel[onnx,serving]"
(cd "$scratch" && venv/bin/python -c "import compressor.serving")
$pip install -c "$constraints" "$wheel[cpu]"
cd "$scratch"
venv/bin/compress --version
venv/bin/compress --help >/dev/null
venv/bin/python - <<'PYTHON'
import compressor
import graph_passes

for package in (compressor, graph_passes):
    assert "site-packages" in package.__file__, package.__file__
    for name in package.__all__:
        getattr(package, name)
PYTHON
echo "the wheel works in an empty environment"
