"""Handcrafted calls of core overloads that no operator of op_db reaches in eager PyTorch."""

from collections.abc import Callable

from conformance.cases import Call

SAMPLES: dict[str, Callable[[], list[Call]]] = {}
