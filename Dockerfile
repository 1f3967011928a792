# The image of a run's pods: `docker build --build-arg TORCH=cuda --tag REGISTRY/argosy:1 .`, or TORCH=cpu.
ARG PYTHON=3.11
ARG TORCH=cpu

FROM python:${PYTHON}-slim-bookworm AS cpu
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

# PyPI's build of torch brings CUDA; the machine gives the driver.
FROM python:${PYTHON}-slim-bookworm AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM ${TORCH}
# torch.compile needs a C++ compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml constraints.txt README.md LICENSE /argosy/
COPY docs /argosy/docs
COPY src /argosy/src
RUN pip install --no-cache-dir --constraint /argosy/constraints.txt "/argosy[parquet,zstd,tls,etcd,kubernetes,devices,store]"
WORKDIR /data
ENTRYPOINT ["python3", "-m", "argosy"]
