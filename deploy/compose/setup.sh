#!/bin/sh
# Secrets for compose.yaml, in .env beside it, made once; and what clients need.
set -eu
cd "$(dirname "$0")"
password() { head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n'; }
if [ ! -e .env ]; then
    umask 077
    cat > .env <<END
WOOLY_DATABASE_PASSWORD=$(password)
# The first administrator's API token: made at the router's first start. It makes tenants and their tokens.
WOOLY_ADMIN_TOKEN=wooly_$(password)
# Where ports are published, and the address that clients are told: 127.0.0.1 is this machine alone.
WOOLY_BIND=127.0.0.1
WOOLY_HOST=127.0.0.1
# With --profile three-nats:
#NATS_CONFIG=cluster.conf
#WOOLY_NATS_REPLICAS=3
END
fi
. ./.env
if [ -z "${WOOLY_ADMIN_TOKEN:-}" ]; then # of before, when NATS asked for passwords
    WOOLY_ADMIN_TOKEN=wooly_$(password)
    echo "WOOLY_ADMIN_TOKEN=$WOOLY_ADMIN_TOKEN" >> .env
fi
echo "WOOLYAI_CONTROLLER_URL=http://$WOOLY_HOST:8420 WOOLYAI_CREDENTIAL=$WOOLY_ADMIN_TOKEN"
