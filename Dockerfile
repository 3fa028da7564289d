# The recipes in a container, with the versions of constraints.txt.
#
#   docker build --target cuda -t recipes:cuda .
#   docker build --target cpu -t recipes:cpu --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's index of CPU builds> .
#   docker run --rm recipes:cpu doctor
#   docker run --rm --init --gpus all --ipc host -v "$PWD:/data" -v recipes-cache:/cache recipes:cuda sft --config mine.yaml

FROM python:3.11.14-slim-bookworm AS build
ENV PIP_CACHE_DIR=/tmp/pip PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
WORKDIR /build
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY src src
COPY accelerate_configs accelerate_configs
COPY recipes recipes
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=cache,target=/tmp/pip \
    /opt/venv/bin/pip install -c constraints.txt ".[track,corpus,eval]"

# torch's default build includes the CUDA libraries; the host needs only the driver and the container toolkit.
FROM build AS build-cuda
# Wheel of FlashAttention, of which PyPI has the source only.
ARG FLASH_ATTENTION
RUN --mount=type=cache,target=/tmp/pip \
    /opt/venv/bin/pip install -c constraints.txt ".[track,corpus,eval,gpu,deepspeed]" $FLASH_ATTENTION

# The image needs a compiler: torch.compile and DeepSpeed build kernels at run time.
FROM python:3.11.14-slim-bookworm AS runtime
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt,sharing=locked \
    apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && useradd --home-dir /cache --uid 1000 recipes \
    && mkdir /cache /data \
    && chown recipes /cache /data \
    && chmod 1777 /cache
# Any user stores models, prepared rows and kernels in /cache: that of `--user` may have no home and no name.
# torchrun would kill its processes 30 seconds after a signal: the time limit is that of `docker stop`.
ENV PATH=/opt/venv/bin:$PATH HOME=/cache USER=recipes HF_HOME=/cache HF_HUB_DISABLE_TELEMETRY=1 PYTHONUNBUFFERED=1 \
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
WORKDIR /app
COPY LICENSE ./
COPY accelerate_configs accelerate_configs
COPY recipes recipes
COPY --chmod=755 docker/entrypoint.sh /usr/local/bin/recipes-entrypoint
VOLUME /cache
WORKDIR /data
# By number: Kubernetes' runAsNonRoot cannot verify a name.
USER 1000
ENTRYPOINT ["recipes-entrypoint"]
CMD ["--help"]
# Without GPUs: a context on each would take memory from the training.
HEALTHCHECK --interval=10m --timeout=2m --start-period=2m CMD ["env", "CUDA_VISIBLE_DEVICES=", "recipes", "doctor"]
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="recipes" \
      org.opencontainers.image.description="Train a language model from raw text to a published assistant" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"

FROM runtime AS cpu
COPY --from=build /opt/venv /opt/venv

FROM runtime AS cuda
COPY --from=build-cuda /opt/venv /opt/venv
