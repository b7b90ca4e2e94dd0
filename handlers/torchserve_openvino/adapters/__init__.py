"""The former name of `torchserve_openvino.hosts`, which Ray's config files and container images may still use."""
