# One image for the controller and every role. `make image` builds it; by hand:
#
#   docker build --target cpu -t rolemesh:cpu .
#
# Targets:    cpu (all but vLLM: the demo, and rewards by rules) and gpu (vLLM, and the compiler that Triton calls).
# Arguments:  BASE, a Debian with Python 3.11 or 3.12.
#             TORCH, a requirement for `uv pip install`, to use another build of the lock's torch, e.g.
#             "torch==2.13.0 --index-url …". Empty: the lock's own, with the CUDA libraries. Not for gpu: vLLM's wheel
#             needs the lock's torch.
ARG BASE=python:3.11-slim-bookworm

# What an image needs of pyproject.toml and the lock: what else changes in them leaves the layer with the libraries.
FROM ${BASE} AS asked
COPY scripts/image-requirements /
RUN python3 /image-requirements python
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --quiet --no-cache-dir uv==0.13.9
COPY pyproject.toml requirements.lock /
RUN --mount=type=cache,target=/root/.cache/uv \
    python3 /image-requirements cpu /pyproject.toml > /cpu.txt && \
    /opt/uv/bin/uv pip compile --quiet /cpu.txt --constraint /requirements.lock --generate-hashes --no-header \
        --no-annotate --no-emit-index-url --output-file /cpu.lock && \
    touch --date=@0 /cpu.txt /cpu.lock

# What changes seldom: all libraries, compiled. Roles run as a user who may not write beside them, and would
# otherwise compile torch at each start. uv stays, for images that add to this one.
FROM ${BASE} AS libraries
RUN useradd --uid 1000 --create-home rolemesh && mkdir /workspace && chown 1000:1000 /workspace
ENV VIRTUAL_ENV=/opt/rolemesh PATH=/opt/rolemesh/bin:$PATH \
    UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy PYC_INVALIDATION_MODE=UNCHECKED_HASH \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN python3 -m venv "$VIRTUAL_ENV" && pip install --quiet --no-cache-dir uv==0.13.9
COPY --from=asked /cpu.txt /cpu.lock /src/
ARG TORCH=
# The lock as a constraint, of versions and hashes: another build of torch brings less than it names.
RUN --mount=type=cache,target=/root/.cache/uv \
    if [ -n "$TORCH" ]; then uv pip install $TORCH; fi && \
    uv pip install --constraint /src/cpu.lock --requirement /src/cpu.txt
WORKDIR /workspace
ENTRYPOINT ["rolemesh"]

# What changes often: only its own files, on top of the libraries, so that a new layer is small.
FROM libraries AS code
COPY . /src
RUN uv pip install --no-deps --no-build-isolation --prefix /code /src

FROM libraries AS cpu
COPY --from=code /code $VIRTUAL_ENV
USER 1000:1000

FROM libraries AS gpu
ARG TORCH=
RUN test -z "$TORCH" || { echo "TORCH is for the target cpu: vLLM's wheel needs the lock's own torch" >&2; exit 1; }
# Triton compiles the launchers of its kernels when they are first used.
RUN apt-get update -q && apt-get install -y -q --no-install-recommends gcc libc6-dev python3-dev && \
    rm -rf /var/lib/apt/lists/*
# The layers below have their versions from requirements.lock, and this lock has the same.
COPY requirements-gpu.lock /src/
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --require-hashes --requirement /src/requirements-gpu.lock
# The container toolkit refuses a node whose driver is too old for the lock's torch (driver 580 or newer).
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility NVIDIA_REQUIRE_CUDA=cuda>=13.0
COPY --from=code /code $VIRTUAL_ENV
USER 1000:1000
