"""Files from outside, read within bounds, and files of ours, written completely or not at all."""
