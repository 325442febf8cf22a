# Two images from one file: `api` (no torch) and `worker` (scheduler, Ray and training).
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# A named user: Ray and libpq look the user id up in /etc/passwd.
RUN useradd --create-home --uid 1000 longlaw && install -d -o longlaw -g longlaw /var/lib/longlaw
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY longlaw longlaw
COPY api api
COPY orchestrator orchestrator
COPY database database
COPY workers workers
COPY fitting fitting
COPY migrations migrations
COPY grids grids

FROM base AS api
RUN pip install -c constraints.txt '.[api]'
USER longlaw
CMD ["python", "-m", "api"]

FROM base AS worker
RUN pip install -c constraints.txt '.[worker]'
USER longlaw
CMD ["python", "-m", "orchestrator.scheduler"]
