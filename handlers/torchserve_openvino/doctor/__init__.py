"""Why an operator does not run on OpenVINO, where in the user's code, and what to do next.

The stages, in order: target (what is looked at) -> diagnose (compile, run, time) -> next_steps (what helps, tried out)
-> render_text, render_html, dot, which read the diagnosis' dict only.
"""
