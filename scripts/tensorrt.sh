#!/bin/sh
# tensorrt.sh PYTHON FOLDER: the Python bindings of three TensorRT versions, about 1 MB each and without the libraries, for
# the tests of what differs between them.
set -eu
for wanted in 8.6=tensorrt_bindings==8.6.1 10.16=tensorrt_cu12_bindings==10.16.1.11 11.4=tensorrt_cu13_bindings==11.4.0.106; do
    place=$2/${wanted%%=*}
    [ -d "$place/tensorrt_bindings" ] && continue
    "$1" -m pip install -qq --disable-pip-version-check --no-deps --target "$place" "${wanted#*=}"
done
