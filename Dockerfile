# The recipes in a container, with the versions of constraints.txt.
#
#   docker build --target cuda -t recipes:cuda .
#   docker build --target cpu -t recipes:cpu --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's index of CPU builds> .
#   docker run --rm recipes:cpu doctor
#   docker run --rm --gpus all --ipc host -v "$PWD:/data" -w /data --entrypoint accelerate recipes:cuda \
#       launch --config_file /app/accelerate_configs/single_gpu.yaml /app/recipes/sft.py --config mine.yaml

FROM python:3.11-slim AS build
ENV PIP_CACHE_DIR=/tmp/pip PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=cache,target=/tmp/pip \
    /opt/venv/bin/pip install -c constraints.txt ".[track]"

# The default build of torch brings its own CUDA libraries; the host needs the driver and the container toolkit only.
FROM build AS build-cuda
RUN --mount=type=cache,target=/tmp/pip \
    /opt/venv/bin/pip install -c constraints.txt ".[track,gpu,deepspeed]"

# A compiler stays in the image: torch.compile and DeepSpeed build kernels while they run.
FROM python:3.11-slim AS runtime
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 recipes \
    && mkdir /cache \
    && chown recipes /cache
ENV PATH=/opt/venv/bin:$PATH HF_HOME=/cache HF_HUB_DISABLE_TELEMETRY=1 PYTHONUNBUFFERED=1
WORKDIR /app
COPY LICENSE ./
COPY accelerate_configs accelerate_configs
COPY recipes recipes
VOLUME /cache
USER recipes
ENTRYPOINT ["recipes"]
CMD ["--help"]

FROM runtime AS cpu
COPY --from=build /opt/venv /opt/venv

FROM runtime AS cuda
COPY --from=build-cuda /opt/venv /opt/venv
