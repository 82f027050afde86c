# What every image of Wooly stands on: Python 3.11 to 3.14, a user without rights, and the tools to install into /opt/wooly.
ARG BASE=python:3.12-slim-trixie
FROM ${BASE}
RUN groupadd --gid 10001 wooly && useradd --uid 10001 --gid 10001 --create-home --home-dir /home/wooly wooly \
    && mkdir -p /opt/wooly /var/lib/wooly /work && chown wooly:wooly /var/lib/wooly /work
ENV PATH=/opt/wooly/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY deploy/docker/healthy.py /usr/local/lib/wooly/healthy.py
WORKDIR /work
