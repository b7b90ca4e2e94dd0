"""Passes over a converted ov.Model: each avoids one kind of fault of the CPU plugin, or keeps a kernel cheap."""
