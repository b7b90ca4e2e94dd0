"""Survives the death of a process inside OpenVINO's compiler."""
