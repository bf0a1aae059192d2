# A node of KVFS: docker build -t kvfs . ; docker-compose.yml says what a container of it is given.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
# fuse3 mounts where the container may not; the headers and the compiler build pyfuse3; Ganesha serves NFS.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        fuse3 libfuse3-3 libfuse3-dev pkg-config gcc libc6-dev nfs-ganesha nfs-ganesha-vfs \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/kvfs
# What changes seldom first: a new commit installs no package again.
COPY requirements.lock setup.cfg pyproject.toml README.md LICENSE ./
RUN pip install --no-cache-dir -r requirements.lock
COPY kvfs kvfs
COPY gateway gateway
COPY gds gds
COPY s3api s3api
COPY cli cli
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
ENTRYPOINT ["kvfs"]
