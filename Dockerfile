# One image for all three services and the command line:  docker build -t pilotfish .
#   docker run --rm -v pilotfish-models:/models pilotfish pull smollm2
FROM python:3.12-slim

# Extras of the package to install, such as "gpu".
ARG EXTRAS=""

WORKDIR /opt/pilotfish
COPY pyproject.toml constraints.txt hatch_build.py README.md ./
COPY protos protos
COPY pilotfish pilotfish
COPY orchestrator orchestrator
COPY target_svc target_svc
COPY draft_svc draft_svc
# torch's wheel brings its own CUDA libraries, so the host only needs the driver and the container toolkit.
RUN pip install --no-cache-dir -c constraints.txt ".${EXTRAS:+[$EXTRAS]}"

# A volume mounted at /models starts with this owner, so that the services need not run as root.
RUN useradd --create-home pilotfish && install -d -o pilotfish /models
USER pilotfish
WORKDIR /home/pilotfish
ENV PILOTFISH_HOME=/models PYTHONUNBUFFERED=1

ENTRYPOINT ["pilotfish"]
