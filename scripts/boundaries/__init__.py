"""Where OpenVINO's CPU plugin changes its kernels with the sizes of a graph."""
