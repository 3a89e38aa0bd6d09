# One image for the controller and every role. `make image` builds it; by hand:
#
#   docker build --target cpu -t rolemesh:cpu .
#
# Targets:    cpu (all but vLLM: the demo, and rewards by rules) and gpu (vLLM, and the compiler that Triton calls).
# Arguments:  BASE, a Debian with Python 3.11 or newer.
#             TORCH, what to ask `uv pip install` for to have another build of the lock's torch, e.g.
#             "torch==2.13.0 --index-url …". Empty: the lock's own, with the CUDA libraries.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS uv
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --quiet --no-cache-dir uv==0.13.9

# What changes seldom: the interpreter's environment with all libraries, compiled. Roles run as a user who may not
# write beside them, and would else compile torch at each start.
FROM ${BASE} AS libraries
RUN useradd --uid 1000 --create-home rolemesh && mkdir /workspace && chown 1000:1000 /workspace
ENV VIRTUAL_ENV=/opt/rolemesh PATH=/opt/rolemesh/bin:$PATH \
    UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy PYC_INVALIDATION_MODE=UNCHECKED_HASH \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
COPY pyproject.toml requirements.lock /src/
ARG TORCH=
# The lock as a constraint: its versions and its hashes, of what is needed here.
RUN --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv --mount=type=cache,target=/root/.cache/uv \
    python3 -m venv --without-pip "$VIRTUAL_ENV" && \
    if [ -n "$TORCH" ]; then /opt/uv/bin/uv pip install $TORCH; fi && \
    /opt/uv/bin/uv pip install --constraint /src/requirements.lock -r /src/pyproject.toml \
        --extra tensorboard --extra wandb --extra mlflow
WORKDIR /workspace
ENTRYPOINT ["rolemesh"]

# What changes often: only its own files, laid over the environment, so that a new layer is small.
FROM libraries AS code
COPY . /src
RUN --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv \
    /opt/uv/bin/uv pip install --no-deps --no-build-isolation --prefix /code /src

FROM libraries AS cpu
COPY --from=code /code $VIRTUAL_ENV
USER 1000:1000

FROM libraries AS gpu
# Triton compiles the launchers of its kernels when they are first used.
RUN apt-get update -q && apt-get install -y -q --no-install-recommends gcc libc6-dev python3-dev && \
    rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv --mount=type=cache,target=/root/.cache/uv \
    /opt/uv/bin/uv pip install --constraint /src/requirements.lock -r /src/pyproject.toml --extra vllm
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=code /code $VIRTUAL_ENV
USER 1000:1000
