# A server of language models in a container: for CPUs, or with the torch of CUDA by a build argument.
#
#   docker build --tag labinfer .
#   docker run --rm --init --shm-size 1g --publish 8000:8000 labinfer
#
# Build arguments:
#   TORCH_INDEX        package index of torch: https://download.pytorch.org/whl/cu130 has the one for CUDA 13
#   RUNTIME_PACKAGES   further Debian packages of the image; Triton's kernels on CUDA need "gcc libc6-dev python3-dev"
#   TARGETS            processors to compile the functions for (labinfer/native/targets.py); fewer build faster
#   BASE               image with Debian's packages, and Python 3.10 or later as python3
#   PIP_INDEX_URL      package index of all but torch, such as a mirror of PyPI
#
# Ranks of one container exchange data through /dev/shm, of which Docker gives 64 MiB: say --shm-size 1g (Kubernetes: an
# emptyDir of medium Memory at /dev/shm). The user is labinfer (1000); ~/.cache keeps what a start measures and compiles, and
# downloaded models, so mount a volume there.
ARG BASE=debian:trixie-slim

FROM ${BASE} AS build
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_INDEX_URL
ARG TARGETS=x86-64-v4-amx,x86-64-v4-bf16,x86-64-v4-vnni,x86-64-v4,x86-64-v3-vnni,x86-64-v3,armv8.6,armv8.2
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv g++
RUN python3 -m venv /opt/labinfer
RUN /opt/labinfer/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH" "setuptools>=68"
COPY . /src
# What LABInfer needs comes first, as the script that builds its wheel imports it.
RUN /opt/labinfer/bin/pip install --no-cache-dir "/src[mpi,modelscope]"
RUN /opt/labinfer/bin/python /src/tools/build_wheel.py --output /tmp/wheels --targets "$TARGETS"
RUN /opt/labinfer/bin/pip install --no-cache-dir --no-deps --force-reinstall /tmp/wheels/labinfer-*.whl

FROM ${BASE}
ARG RUNTIME_PACKAGES=""
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates python3 $RUNTIME_PACKAGES && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 labinfer
RUN mkdir -p /home/labinfer/.cache && chown labinfer:labinfer /home/labinfer/.cache
COPY --from=build /opt/labinfer /opt/labinfer
ENV PATH=/opt/labinfer/bin:/usr/local/bin:/usr/bin:/bin
USER labinfer
WORKDIR /home/labinfer
VOLUME /home/labinfer/.cache
EXPOSE 8000
# /health says 200 as soon as the server listens, and 503 when its ranks are stalled or gone.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m --retries=3 CMD ["python3", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["labinfer"]
CMD ["serve", "--host", "0.0.0.0"]
