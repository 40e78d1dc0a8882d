# Two images of the command `compress`:
#   docker build --target cpu -t compress .     docker run --rm -v "$PWD:/work" compress model/
#   docker build --target cuda -t compress .    docker run --rm --gpus all -v "$PWD:/work" compress model/
# `make docker-check` runs the RUN lines below in a clean folder, without a container engine.

FROM python:3.11-slim AS source
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY compressor compressor
COPY graph_passes graph_passes

FROM source AS cpu
# Here torch has a build without CUDA, which is a tenth of the size.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN python -m venv .venv
RUN .venv/bin/pip install --no-cache-dir -c constraints.txt ".[cpu]"
RUN .venv/bin/compress --version
ENV PATH=/app/.venv/bin:$PATH HOME=/tmp
USER 10001:10001
WORKDIR /work
ENTRYPOINT ["compress"]

FROM source AS cuda
# The CUDA libraries come with torch and ONNX Runtime; the driver comes with the host.
RUN python -m venv .venv
RUN .venv/bin/pip install --no-cache-dir -c constraints.txt ".[gpu]"
RUN .venv/bin/compress --version
ENV PATH=/app/.venv/bin:$PATH HOME=/tmp NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /work
ENTRYPOINT ["compress"]
