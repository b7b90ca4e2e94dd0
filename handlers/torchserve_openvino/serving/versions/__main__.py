"""Runs the probes that the versions of the named packages decide; prints each outcome as a line of JSON."""

import json
import sys

from torchserve_openvino.serving.versions.probes import run_probes

for outcome in run_probes(sys.argv[1:]):
    print(json.dumps(outcome._asdict()), flush=True)
