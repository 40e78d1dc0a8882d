#!/bin/sh
# exporters.sh PYTHON FOLDER: installs onnxsim, and optimum's exporter in an environment of its own with the older
# transformers that it needs, for the matrix of exporters (tests/graph/matrix.py).
set -eu
python=$1 folder=$2 pins=$(dirname "$0")/../benchmarks/rivals/pins
install="-m pip install -qq --disable-pip-version-check"
[ -d "$folder/onnxsim" ] || "$python" $install --no-deps --target "$folder/onnxsim" -r "$pins/onnxsim.txt"
[ -f "$folder/optimum/ready" ] && exit
"$python" -m venv --clear "$folder/optimum"
# torch alone is installed with what it needs: its builds for GPUs come in several packages.
"$folder/optimum/bin/python" $install -c "$pins/sentence-onnx.txt" torch
"$folder/optimum/bin/python" $install --no-deps -r "$pins/sentence-onnx.txt"
touch "$folder/optimum/ready"
