"""Private modules of torch and OpenVINO, each behind one file; tests/contract pins what they rest on."""
