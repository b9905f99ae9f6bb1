# docker build -t pods-rl .                                         with CUDA: the index's builds of PyTorch bring it
# docker build -t pods-rl --build-arg TORCH_INDEX=ADDRESS .          for CPUs, with the address of PyTorch's index of CPU builds
# mkdir -p runs && docker run --rm -it --gpus all --user "$(id -u):$(id -g)" -v "$PWD/runs:/work/runs" pods-rl train tiny-pods
#
# The container runs as you and writes into your folder `runs`. Docker would make a missing one as root.
FROM python:3.11-slim
ARG TORCH_INDEX=""
ARG EXTRAS=""
# Triton compiles kernels with gcc.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev git && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==2.13.0"
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt ".${EXTRAS:+[$EXTRAS]}" && useradd --create-home pods && mkdir /work && chmod 777 /work /home/pods
# A user of any number, whom no name in the image belongs to, has a home for caches and a name for Python.
ENV HOME=/home/pods USER=pods
USER pods
WORKDIR /work
ENTRYPOINT ["pods"]
CMD ["--help"]
