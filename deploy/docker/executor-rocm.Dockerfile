# An executor for an AMD GPU. TORCH_INDEX: the address of PyTorch's ROCm index.
ARG PYTHON=wooly-python
FROM ${PYTHON} AS build
ARG TORCH_INDEX=""
COPY constraints.txt VERSION hatch_build.py /src/
COPY libs /src/libs
COPY services/executor /src/services/executor
COPY services/compiler /src/services/compiler
COPY deploy/docker/wheels* /wheels/
# A torch for GPUs asks for its own Triton in one version, so constraints.txt must not ask for another.
# Where pip needs a private index or authority: --secret id=pip,src=pip.conf --secret id=ca,src=ca.pem
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/etc/ssl/wooly-ca.pem \
    python3 -m venv /opt/wooly && cd /src && sed -i '/^triton==/d' constraints.txt \
    && pip install -c constraints.txt --find-links /wheels ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install -c constraints.txt ./libs/wis ./libs/bus ./libs/dispatch ./libs/cuda-c ./libs/triton \
       './services/executor[rocm,compiler,object-store]' './services/compiler[rocm]' opentelemetry-exporter-otlp-proto-http \
    && pip uninstall -y pip setuptools wheel

FROM ${PYTHON}
COPY --from=build /opt/wooly /opt/wooly
ENV WOOLY_EXECUTOR_RUNTIME=hip WOOLY_EXECUTOR_STATE_DIR=/var/lib/wooly WOOLY_EXECUTOR_LISTEN=tcp://0.0.0.0:7400 WOOLY_HEALTH_PORT=8081
USER 10001:10001
EXPOSE 7400
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["python", "/usr/local/lib/wooly/healthy.py", "http://127.0.0.1:8081/livez"]
ENTRYPOINT ["python", "-m", "wooly_executor"]
