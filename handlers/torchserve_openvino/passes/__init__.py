"""The passes that change a graph on its way from torch to OpenVINO, in the order of `lists.py`."""
