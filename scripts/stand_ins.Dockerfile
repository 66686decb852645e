# Stand-ins for the images of others, made of Debian's packages, where no image registry is reachable
# (`scripts/engine.sh --images`). Each target behaves like the image that it replaces, as far as the
# Compose file needs it.

# Python 3.11 is copied from this machine: `--build-context interpreter=PREFIX`.
FROM scratch AS interpreter
FROM debian:trixie-slim AS python
ENV PATH=/usr/local/bin:$PATH LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates netbase tzdata libbz2-1.0 libexpat1 \
        libffi8 liblzma5 libncursesw6 libreadline8t64 libsqlite3-0 libssl3t64 libuuid1 zlib1g \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY --from=interpreter / /usr/local/
RUN ldconfig \
    && ln -s python3.11 /usr/local/bin/python3 && ln -s python3.11 /usr/local/bin/python \
    && python -m ensurepip && ln -s pip3 /usr/local/bin/pip \
    && python -c 'import bz2, ctypes, lzma, readline, sqlite3, ssl, venv, zlib'
ENV PYTHONDONTWRITEBYTECODE=
CMD ["python3"]

FROM debian:testing-slim AS packages
# A mirror may be some weeks old.
RUN apt-get -o Acquire::Check-Valid-Until=false update \
    && mkdir -p /etc/postgresql-common && echo create_main_cluster=false >/etc/postgresql-common/createcluster.conf \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        busybox ca-certificates curl postgresql-18 prometheus prometheus-alertmanager \
    && ln -s busybox /usr/bin/wget \
    && apt-get clean && rm -rf /var/lib/apt/lists/*

# The first start makes the database that POSTGRES_DB, POSTGRES_USER and POSTGRES_PASSWORD name.
FROM packages AS postgres
ENV PATH=/usr/lib/postgresql/18/bin:$PATH PGDATA=/var/lib/postgresql/18/docker
COPY --chmod=755 <<'ENTRY' /usr/local/bin/docker-entrypoint.sh
#!/bin/sh
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    secret=${POSTGRES_PASSWORD:-$(cat "${POSTGRES_PASSWORD_FILE:-/dev/null}")}
    [ -n "$secret" ] || { echo "POSTGRES_PASSWORD is not set" >&2; exit 1; }
    printf '%s' "$secret" >/tmp/secret
    initdb --username="${POSTGRES_USER:=postgres}" --pwfile=/tmp/secret --auth-local=trust --auth-host=trust
    rm /tmp/secret
    echo 'host all all all scram-sha-256' >>"$PGDATA/pg_hba.conf"
    pg_ctl start --wait --options="-c listen_addresses=''"
    psql --username="$POSTGRES_USER" --dbname=postgres --command="CREATE DATABASE \"${POSTGRES_DB:-$POSTGRES_USER}\"" || [ "$POSTGRES_USER" = postgres ]
    pg_ctl stop --wait --mode=fast
fi
exec "$@"
ENTRY
RUN install --directory --owner=postgres --group=postgres --mode=1777 /var/lib/postgresql /var/run/postgresql
VOLUME /var/lib/postgresql
STOPSIGNAL SIGINT
EXPOSE 5432
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["postgres", "-c", "listen_addresses=*"]

FROM packages AS prometheus
RUN install --directory --owner=nobody --mode=755 /prometheus
WORKDIR /prometheus
USER nobody
EXPOSE 9090
ENTRYPOINT ["/bin/prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]

FROM packages AS alertmanager
RUN ln -s prometheus-alertmanager /bin/alertmanager \
    && install --directory --owner=nobody --mode=755 /alertmanager
WORKDIR /alertmanager
USER nobody
EXPOSE 9093
ENTRYPOINT ["/bin/alertmanager"]
CMD ["--config.file=/etc/alertmanager/alertmanager.yml", "--storage.path=/alertmanager"]

# Debian has no package of Grafana: this stand-in only reports that it is healthy.
FROM packages AS grafana
RUN mkdir -p /srv/api && echo '{"database": "ok"}' >/srv/api/health \
    && install --directory --owner=472 --mode=755 /var/lib/grafana
USER 472:0
EXPOSE 3000
ENTRYPOINT ["busybox", "httpd", "-f", "-p", "3000", "-h", "/srv"]
