#!/bin/sh
# Passwords for compose.yaml, in .env beside it, made once; and the address for clients.
set -eu
cd "$(dirname "$0")"
password() { head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n'; }
if [ ! -e .env ]; then
    umask 077
    cat > .env <<END
WOOLY_SERVICES_PASSWORD=$(password)
WOOLY_CLIENT_PASSWORD=$(password)
WOOLY_DATABASE_PASSWORD=$(password)
# Where ports are published, and the address that clients are told: 127.0.0.1 is this machine alone.
WOOLY_BIND=127.0.0.1
WOOLY_HOST=127.0.0.1
# With --profile three-nats:
#NATS_CONFIG=cluster.conf
END
fi
. ./.env
echo "WOOLYAI_CONTROLLER_URL=nats://client:$WOOLY_CLIENT_PASSWORD@$WOOLY_HOST:4222"
