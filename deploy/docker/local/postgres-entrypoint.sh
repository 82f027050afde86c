#!/bin/sh
# initdb at the first start, then the server: POSTGRES_USER, POSTGRES_PASSWORD, POSTGRES_DB.
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    umask 077
    printf %s "$POSTGRES_PASSWORD" > /tmp/password
    initdb --encoding=UTF8 --locale=C.UTF-8 --username="$POSTGRES_USER" --pwfile=/tmp/password --auth-host=scram-sha-256 --auth-local=trust
    rm /tmp/password
    echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
    pg_ctl -o "-c listen_addresses= -k /tmp" -w start
    createdb -h /tmp -U "$POSTGRES_USER" "$POSTGRES_DB"
    for file in /docker-entrypoint-initdb.d/*.sql; do
        [ ! -e "$file" ] || psql -h /tmp -U "$POSTGRES_USER" -d "$POSTGRES_DB" -v ON_ERROR_STOP=1 -f "$file"
    done
    pg_ctl -m fast -w stop
fi
exec postgres -c listen_addresses='*' -k /tmp
