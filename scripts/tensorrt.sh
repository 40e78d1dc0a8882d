#!/bin/sh
# tensorrt.sh PYTHON FOLDER: installs the Python bindings of three TensorRT versions, about 1 MB each and without the
# libraries, for the tests of the differences between versions.
set -eu
for requirement in 8.6=tensorrt_bindings==8.6.1 10.16=tensorrt_cu12_bindings==10.16.1.11 11.4=tensorrt_cu13_bindings==11.4.0.106; do
    target=$2/${requirement%%=*}
    [ -d "$target/tensorrt_bindings" ] && continue
    "$1" -m pip install -qq --disable-pip-version-check --no-deps --target "$target" "${requirement#*=}"
done
