# Millrace in a container, as a user without rights:
#   docker build -t millrace .                               any machine; --build-arg EXTRAS=... names the extras
#   docker build -t millrace:gpu --build-arg EXTRAS=[flows,trainer,vllm] .   with vLLM; run it by --gpus all --shm-size 16g
#   docker run --rm -v "$PWD/artifacts:/work/artifacts" millrace run experiment=countdown_demo
# On x86-64 the registry's torch is a CUDA build of several GB, which runs without a GPU too. For a CPU build name the
# index that has one: --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.12-slim-bookworm AS build
ARG EXTRAS=[flows,trainer,sandbox]
ARG PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/millrace
WORKDIR /src
COPY constraints.txt ./
RUN /opt/millrace/bin/pip install -c constraints.txt "$(grep '^torch==' constraints.txt)"
COPY . .
RUN /opt/millrace/bin/pip install -c constraints.txt ".${EXTRAS}"

FROM python:3.12-slim-bookworm
# bubblewrap: programs that a model wrote. git: the commit in a run's lineage. gcc: compiled layers and kernels.
# Debian keeps the newest version of a package alone, so there is none to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap gcc git libc6-dev libseccomp2 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 millrace \
    && install -d -o millrace /work
COPY --from=build /opt/millrace /opt/millrace
ENV PATH=/opt/millrace/bin:$PATH \
    DO_NOT_TRACK=1 MLFLOW_DISABLE_TELEMETRY=true PREFECT_SERVER_ANALYTICS_ENABLED=false RAY_USAGE_STATS_ENABLED=0 \
    VLLM_NO_USAGE_STATS=1 OMP_WAIT_POLICY=PASSIVE
USER 1000
WORKDIR /work
ENTRYPOINT ["millrace"]
CMD ["--help"]
