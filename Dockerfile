# One image for all three services and the command line:  docker build -t pilotfish .
#   docker run --rm -v pilotfish_models:/models pilotfish pull smollm2
FROM python:3.12-slim

# Where pip looks besides its own index, such as https://download.pytorch.org/whl/cpu for torch without CUDA.
# torch's usual wheel brings its own CUDA libraries: the host needs only the driver and the container toolkit.
ARG PIP_EXTRA_INDEX_URL

# Compiles the CPU kernels when they are first needed.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/pilotfish
# The dependencies have a layer of their own, so that a change to the code does not install torch again.
COPY pyproject.toml constraints.txt ./
RUN python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        print(*project["dependencies"], *project["optional-dependencies"]["serve"], sep="\n")' > requirements.txt \
    && pip install --no-cache-dir -c constraints.txt -r requirements.txt
COPY heads heads
RUN pip install --no-cache-dir --no-deps ./heads
COPY . .
RUN pip install --no-cache-dir --no-deps .

# A volume mounted at /models starts with this owner, so that the services need not run as root.
RUN useradd --create-home pilotfish && install -d -o pilotfish /models
USER pilotfish
WORKDIR /home/pilotfish
ENV PILOTFISH_HOME=/models HF_HOME=/models/huggingface PYTHONUNBUFFERED=1

ENTRYPOINT ["pilotfish"]
