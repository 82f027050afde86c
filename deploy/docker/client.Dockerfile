# Where people run their scripts: Python, CPU torch, `wooly`. "cuda" is a GPU elsewhere.
ARG PYTHON=wooly-python
FROM ${PYTHON} AS build
ARG TORCH_INDEX=""
COPY constraints.txt VERSION hatch_build.py /src/
COPY libs /src/libs
COPY services/intercept /src/services/intercept
COPY deploy/docker/wheels* /wheels/
# A torch for GPUs asks for its own Triton in one version, so constraints.txt must not ask for another.
# Where pip needs a private index or authority: --secret id=pip,src=pip.conf --secret id=ca,src=ca.pem
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/etc/ssl/wooly-ca.pem \
    python3 -m venv /opt/wooly && cd /src && sed -i '/^triton==/d' constraints.txt \
    && pip install -c constraints.txt --find-links /wheels ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install -c constraints.txt ./libs/wis ./libs/bus ./libs/cuda-c ./services/intercept

FROM ${PYTHON}
# pip stays: people add what their scripts need.
COPY --from=build --chown=10001:10001 /opt/wooly /opt/wooly
USER 10001:10001
CMD ["wooly", "--help"]
