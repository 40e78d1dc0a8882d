"""OpenVINO as a target: graphs compiled for the processor of this machine."""
