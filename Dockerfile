# docker build -t pods-rl .                                         with CUDA: the index's builds of PyTorch bring it
# docker build -t pods-rl --build-arg TORCH_INDEX=ADDRESS .          for CPUs, with the address of PyTorch's index of CPU builds
# docker run --rm -it --gpus all -v "$PWD/runs:/work/runs" pods-rl train tiny-pods
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
RUN pip install --no-cache-dir -c constraints.txt ".${EXTRAS:+[$EXTRAS]}" && useradd --create-home pods && mkdir /work && chown pods /work
USER pods
WORKDIR /work
ENTRYPOINT ["pods"]
CMD ["--help"]
