"""Finds out why an operator does not run on OpenVINO, where it is in the user's code, and what to do next.

The stages, in order: target (load the model) -> diagnose (compile, run, time) -> next_steps (find and try what helps)
-> rendering (text, html, dot), which reads only the diagnosis as a dict.
"""
