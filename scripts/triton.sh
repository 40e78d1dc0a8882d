#!/bin/sh
# A Triton server for the tests, in an environment of its own: `triton.sh PYTHON FOLDER`.
# It has the Python backend alone, whose stub is built for one Python each and needs that one's libpython, and numpy<2.
set -eu
python=$1 folder=$2
"$python" -m venv --clear "$folder"
pip="$folder/bin/python -m pip install -qq --disable-pip-version-check"
$pip numpy==1.26.4 onnxruntime==1.31.1
$pip --no-deps nvidia-pytriton==0.7.0
version=$("$folder/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
libraries=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
server=$(echo "$folder"/lib/python*/site-packages/pytriton/tritonserver)
stub=$server/backends/python/triton_python_backend_stub
cp "$server/python_backend_stubs/$version/triton_python_backend_stub" "$stub"
if LD_LIBRARY_PATH=$libraries ldd "$stub" | grep "not found" >&2; then
    echo "triton.sh: $python comes without the library above; name one that has it" >&2
    exit 1
fi
echo "$libraries" >"$folder/ready"
