# The operator for Kubernetes.
ARG PYTHON=wooly-python
FROM ${PYTHON} AS build
COPY constraints.txt VERSION hatch_build.py /src/
COPY libs /src/libs
COPY deploy/operator /src/deploy/operator
# Where pip needs a private index or authority: --secret id=pip,src=pip.conf --secret id=ca,src=ca.pem
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/etc/ssl/wooly-ca.pem \
    python3 -m venv /opt/wooly && cd /src && pip install -c constraints.txt "./deploy/operator[otlp]" \
    && pip uninstall -y pip setuptools wheel

FROM ${PYTHON}
COPY --from=build /opt/wooly /opt/wooly
ENV WOOLY_OPERATOR_HEALTH_URL=http://0.0.0.0:8080/healthz
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "/usr/local/lib/wooly/healthy.py", "http://127.0.0.1:8080/healthz"]
ENTRYPOINT ["python", "-m", "wooly_operator"]
