# One peer in a container. Build for CPUs (small), or with --build-arg TORCH=cuda for NVIDIA GPUs:
#     docker build -t swarmtrain .
#     docker run --rm swarmtrain --help
#     docker run --rm -it -v swarmtrain:/data -p 7766:7766 swarmtrain bootstrap my-run.run
# Identity, logs, checkpoints and results live in /data.
FROM python:3.11-slim

ARG TORCH=auto

WORKDIR /opt/swarmtrain
COPY pyproject.toml README.md LICENSE ./
COPY tools tools
COPY compression compression
COPY peer peer
COPY swarmtrain swarmtrain
RUN python tools/setup_environment.py --torch "$TORCH" && rm -rf /root/.cache

RUN useradd --create-home --uid 1000 peer && install -d -o peer /data
USER peer
WORKDIR /data
VOLUME /data
ENV SWARMTRAIN_STATE=/data/state
EXPOSE 7766
ENTRYPOINT ["/opt/swarmtrain/.venv/bin/swarmtrain"]
CMD ["--help"]
