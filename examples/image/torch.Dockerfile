# The same with torch, for models that the driver alone doesn't run: to compare sizes.
#
#     docker build -f examples/image/torch.Dockerfile -t precast-serve-torch .
FROM debian:bookworm-slim AS installed
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-pip
COPY . /source
RUN pip install --no-cache-dir --no-compile --target /installed "/source[torch]"

FROM debian:bookworm-slim
# Triton compiles its launchers by a C compiler, and kernels that no native layer has.
RUN apt-get update && apt-get install -y --no-install-recommends python3 gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=installed /installed /opt/precast
RUN PYTHONPATH=/opt/precast python3 -m compileall -q /opt/precast \
    && useradd --system serve && ln -s /opt/precast/bin/precast /usr/local/bin/precast
ENV PYTHONPATH=/opt/precast PYTHONSAFEPATH=1
USER serve
CMD ["precast", "--help"]
