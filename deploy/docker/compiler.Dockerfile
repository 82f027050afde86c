# The compiler: programs to kernels, for the processors and GPUs whose vendors' compilers are in the image: PoCL's in all, and with
# EXTRAS=[cuda] NVRTC and Triton, with EXTRAS=[rocm] hipRTC's bindings, clang and Triton. No GPU is needed to build or to run them.
ARG PYTHON=wooly-python
FROM ${PYTHON} AS build
ARG EXTRAS=""
COPY constraints.txt VERSION hatch_build.py /src/
COPY libs /src/libs
COPY services/compiler /src/services/compiler
# Where pip needs a private index or authority: --secret id=pip,src=pip.conf --secret id=ca,src=ca.pem
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/etc/ssl/wooly-ca.pem \
    python3 -m venv /opt/wooly && cd /src && pip install -c constraints.txt ./libs/wis ./libs/bus ./libs/cuda-c ./libs/triton "./services/compiler${EXTRAS}" opentelemetry-exporter-otlp-proto-http \
    && pip uninstall -y pip setuptools wheel

FROM ${PYTHON}
ARG EXTRAS=""
# PoCL links what it compiles. For AMD, clang compiles what needs no device library of ROCm.
RUN apt-get update && apt-get install -y --no-install-recommends binutils \
    && if [ "$EXTRAS" = "[rocm]" ]; then apt-get install -y --no-install-recommends clang-19 lld-19; fi \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/wooly /opt/wooly
ENV WOOLY_COMPILER_STATE_DIR=/var/lib/wooly WOOLY_HEALTH_PORT=8081
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "/usr/local/lib/wooly/healthy.py", "http://127.0.0.1:8081/livez"]
ENTRYPOINT ["python", "-m", "wooly_compiler"]
