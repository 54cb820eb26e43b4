# Not built by CI.
# The CPU stack: docker build -t rlsdk . && docker run --rm --shm-size 2g rlsdk train examples/quickstart.yaml
FROM python:3.11-slim-bookworm

# vLLM and torch compile kernels when a run starts.
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/rlsdk
COPY . .
RUN make venv
ENV PATH="/opt/rlsdk/.venv/bin:$PATH"
# KubeRay starts Ray in a login shell, which sets PATH anew.
RUN ln -s /opt/rlsdk/.venv/bin/ray /opt/rlsdk/.venv/bin/rlsdk /usr/local/bin/

ENTRYPOINT ["rlsdk"]
CMD ["--help"]
