#!/bin/sh
# triton.sh PYTHON FOLDER: installs a Triton server for the tests into an environment of its own.
# Its only backend is the Python backend, which needs numpy<2, and a stub for its version of Python with that libpython.
set -eu
python=$1 folder=$2
"$python" -m venv --clear "$folder"
pip="$folder/bin/python -m pip install -qq --disable-pip-version-check"
$pip numpy==1.26.4 onnxruntime==1.31.1 openvino==2026.4.1
$pip --no-deps nvidia-pytriton==0.7.0
version=$("$folder/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
libraries=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
server=$(echo "$folder"/lib/python*/site-packages/pytriton/tritonserver)
stub=$server/backends/python/triton_python_backend_stub
cp "$server/python_backend_stubs/$version/triton_python_backend_stub" "$stub"
if LD_LIBRARY_PATH=$libraries ldd "$stub" | grep "not found" >&2; then
    echo "triton.sh: $python lacks the library above; use a Python that has it" >&2
    exit 1
fi
echo "$libraries" >"$folder/ready"
