# PostgreSQL of Debian with as much of the official image's interface as compose.yaml uses, for machines that reach no registry of images.
ARG PYTHON=wooly-python
FROM ${PYTHON}
RUN apt-get update && apt-get install -y --no-install-recommends postgresql && rm -rf /var/lib/apt/lists/* /var/lib/postgresql/*
RUN mkdir -p /var/lib/postgresql/data && chown postgres:postgres /var/lib/postgresql/data \
    && for tool in initdb pg_ctl postgres createdb pg_isready pg_dump psql; do \
       ln -sf /usr/lib/postgresql/*/bin/$tool /usr/local/bin/$tool; done
COPY deploy/docker/local/postgres-entrypoint.sh /usr/local/bin/
ENV PGDATA=/var/lib/postgresql/data
USER postgres
ENTRYPOINT ["postgres-entrypoint.sh"]
