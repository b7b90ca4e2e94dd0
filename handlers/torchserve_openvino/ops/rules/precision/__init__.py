"""Operators that OpenVINO computes in another precision than torch: narrow integers, small results, moments."""
